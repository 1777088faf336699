// Numbers for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** 0.25 s, 3.2 s, 4 min 5 s, 2 h 3 min */
export function duration(seconds) {
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds < 1) return `${seconds.toFixed(2)} s`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** 0 s, 10 s, 4 min 5 s: whole, for what grows on the page */
export function age(seconds) {
  return seconds < 60 ? `${Math.max(0, Math.floor(seconds))} s` : duration(seconds);
}

/** 12 us, 3.4 ms, 1.2 s */
export function latency(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
  return duration(seconds);
}

export function size(bytes) {
  let at = 0;
  while (bytes >= 1024 && at < UNITS.length - 1) {
    bytes /= 1024;
    at += 1;
  }
  return `${bytes.toFixed(at < 2 ? 0 : 1)} ${UNITS[at]}`;
}

/** 5.1 of 23.5 GiB, 16 of 141 GiB */
export function sizeOf(used, whole) {
  let at = 0;
  while (whole >= 1024 && at < UNITS.length - 1) {
    whole /= 1024;
    used /= 1024;
    at += 1;
  }
  const digits = whole < 100 ? 1 : 0;
  return `${used.toFixed(digits)} of ${whole.toFixed(digits)} ${UNITS[at]}`;
}

/** 0, 0.04, 1.4, 12 */
export function rounded(number) {
  return String(Number(number.toFixed(number >= 10 ? 0 : number >= 1 ? 1 : 2)));
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 }); // to make one takes longer than to use it

export function count(number) {
  return whole.format(number);
}

/** 1 call, 2 calls, 1 process, 2 processes */
export function many(number, word) {
  return `${count(number)} ${number === 1 ? word : word.endsWith("s") ? `${word}es` : `${word}s`}`;
}

/** 14:03:12, of Unix time, in the time zone of the browser */
export function clock(at, withMillis = false) {
  const date = new Date(at * 1e3);
  const text = date.toTimeString().slice(0, 8);
  return withMillis ? `${text}.${String(date.getMilliseconds()).padStart(3, "0")}` : text;
}

/** 2026-11-28 14:03:12, of Unix time, in the time zone of the browser */
export function day(at) {
  const date = new Date(at * 1e3);
  const two = (number) => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(at)}`;
}

/** The command line without the path of its interpreter. */
export function shortened(command) {
  return command.replace(/^\S*\/python[\d.]* /, "");
}
