// How one rank is drawn: a colour and a shape for each state, so that either of them is enough.

import { count, duration, size } from "./format.js";

export const WORDS = {
  D: "dead",
  L: "silent",
  T: "stopped",
  S: "stuck",
  W: "deadlocked",
  q: "calls wait",
  b: "busy",
  r: "running",
  i: "idle",
  s: "starting",
  e: "exiting",
  x: "ended",
  ".": "no member",
};

export const MEANINGS = {
  D: "crashed, exited by itself, or was killed",
  L: "runs no Python code: C code holds the GIL, or it waits in the operating system",
  T: "stopped by a signal or a debugger",
  S: "computes without a checkpoint: its Trio loop does not run",
  W: "its call waits, over other calls, for itself",
  q: "calls wait in the mailbox of this actor",
  b: "a call runs in this actor",
  r: "its Trio loop runs",
  i: "no call is under way here",
  s: "is being started",
  e: "is being stopped",
  x: "its service has ended",
  ".": "there is no member at this point",
};

export const LETTERS_OF = { dead: "D", silent: "L", stopped: "T", stuck: "S", running: "r", starting: "s", exiting: "e" };

export const isWrong = (letter) => letter === "D" || letter === "L" || letter === "T" || letter === "S" || letter === "W";

// What a cell can be coloured by besides its state, and the bars of a cell that has room for them. A value is a share of
// the largest one, or of `full`: darker on light, lighter on dark, so without hue.
export const MEASURES = {
  state: { title: "state" },
  cpu: { title: "CPU", short: "CPU", full: 100, text: (value) => `${value} %`, isBar: true },
  gpu: { title: "GPU", short: "GPU", full: 100, text: (value) => `${value} %`, isBar: true },
  memory: { title: "memory", short: "mem", full: 1, text: (value) => (value < 1024 ? `${value} MiB` : size(value * 1024 * 1024)), isBar: true },
  rate: { title: "messages/s", short: "msg/s", full: 1, text: (value) => count(value), isBar: true },
  depth: { title: "mailbox depth", short: "queued", full: 1, text: (value) => `${value} queued` },
  age: { title: "oldest call", short: "call", full: 1, text: (value) => (value < 60 ? `${value.toFixed(1)} s` : duration(value)), isBar: true },
};

/** Return the values of a measure by cell; empty where all are 0. */
export const valuesOf = (grid, key) => grid[key] || [];

/** Return the value that a full bar stands for. */
export function fullOf(grid, key) {
  let most = MEASURES[key].full;
  for (const value of valuesOf(grid, key)) if (value > most) most = value;
  return most;
}

/** Return the bars of a mesh: those that some cell has a value of; an actor mesh has its mailbox, too. */
export function barsOf(grid) {
  return Object.keys(MEASURES).filter((key) => (key === "gpu" ? valuesOf(grid, key).length > 0 : key === "depth" ? grid.kind === "actors" : MEASURES[key].isBar));
}

let colours = null;
let sprites = new Map();

/** Return the colours of the scheme that is on. */
export function palette() {
  if (colours === null) {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(`--${name}`).trim();
    colours = Object.fromEntries(
      ["back", "raised", "ink", "dim", "wrong", "line", "running", "busy", "idle", "stuck", "silent", "stopped", "dead", "mark", "select",
        "bar-ink", "ramp-low", "ramp-high", "mono"].map((name) => [name, get(name)]),
    );
    colours.series = Array.from({ length: 8 }, (_, number) => get(`series-${number}`));
  }
  return colours;
}

/** Forget what was drawn in the other scheme. */
export function forgetColours() {
  colours = null;
  sprites = new Map();
}

/** Return the picture of a state, `side` pixels wide. */
export function sprite(letter, side, ratio = window.devicePixelRatio || 1) {
  const key = `${letter} ${side} ${ratio}`;
  let found = sprites.get(key);
  if (found === undefined) {
    found = document.createElement("canvas");
    found.width = found.height = Math.max(1, Math.round(side * ratio));
    const pen = found.getContext("2d");
    pen.scale(ratio, ratio);
    drawState(pen, letter, side);
    if (sprites.size > 500) sprites = new Map();
    sprites.set(key, found);
  }
  return found;
}

/** Return the space around a cell, of its side. */
export const gapOf = (side) => (side >= 12 ? 1.5 : side >= 6 ? 0.75 : 0.4);

/** Return the colour of a state that has no other sign; null for one that has. */
export function filling(letter) {
  return letter === "r" ? palette().running : letter === "b" ? palette().busy : null;
}

function drawState(pen, letter, side) {
  const gap = gapOf(side);
  const a = gap;
  const b = side - gap;
  const wide = b - a;
  const middle = side / 2;
  const c = palette();
  const thick = Math.max(1.2, wide / 6);
  const fill = (colour) => {
    pen.fillStyle = colour;
    pen.fillRect(a, a, wide, wide);
  };
  const frame = (colour, dash = []) => {
    pen.strokeStyle = colour;
    pen.lineWidth = Math.max(0.8, wide / 12);
    pen.setLineDash(dash);
    const half = pen.lineWidth / 2;
    pen.strokeRect(a + half, a + half, wide - 2 * half, wide - 2 * half);
    pen.setLineDash([]);
  };
  const lines = (colour, width, ...ends) => {
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.beginPath();
    for (const [x1, y1, x2, y2] of ends) {
      pen.moveTo(x1, y1);
      pen.lineTo(x2, y2);
    }
    pen.stroke();
  };
  const inset = wide / 5;
  switch (letter) {
    case "r":
      fill(c.running);
      break;
    case "b":
      fill(c.busy);
      break;
    case "q": // busy, with a bright dot
      fill(c.busy);
      pen.fillStyle = c.back;
      pen.beginPath();
      pen.arc(middle, middle, Math.max(1, wide / 4.5), 0, 7);
      pen.fill();
      break;
    case "i":
      fill(c.idle);
      frame(c.running);
      break;
    case "s":
      frame(c.running, [wide / 5, wide / 5]);
      break;
    case "e": // the lower half
      pen.fillStyle = c.running;
      pen.fillRect(a, middle, wide, wide / 2);
      frame(c.running);
      break;
    case "x":
      pen.fillStyle = c.dim;
      pen.fillRect(middle - wide / 5, middle - wide / 5, (wide / 5) * 2, (wide / 5) * 2);
      break;
    case "S": // a slash
      fill(c.stuck);
      lines(c.mark, thick, [a, b, b, a]);
      break;
    case "L": // a bar, as of a road that is closed
      fill(c.silent);
      lines(c.mark, thick * 1.8, [a + inset / 2, middle, b - inset / 2, middle]);
      break;
    case "T": // two bars, as of a tape that is held
      fill(c.stopped);
      lines(c.mark, thick, [a + wide * 0.32, a + inset, a + wide * 0.32, b - inset], [b - wide * 0.32, a + inset, b - wide * 0.32, b - inset]);
      break;
    case "W": // a ring, as of calls that wait for each other
      fill(c.stuck);
      pen.strokeStyle = c.mark;
      pen.lineWidth = thick * 1.2;
      pen.beginPath();
      pen.arc(middle, middle, wide * 0.28, 0, 7);
      pen.stroke();
      break;
    case "D": // a cross
      fill(c.dead);
      lines(c["bar-ink"], thick, [a + inset / 2, a + inset / 2, b - inset / 2, b - inset / 2], [a + inset / 2, b - inset / 2, b - inset / 2, a + inset / 2]);
      break;
    default:
      pen.fillStyle = c.line;
      pen.fillRect(middle - 0.5, middle - 0.5, 1, 1);
  }
}

/** Return the colour of a share from 0 to 1, one of so many steps. */
export function ramp(share, steps = 256) {
  share = Math.round(share * steps) / steps;
  const c = palette();
  const low = parse(c["ramp-low"]);
  const high = parse(c["ramp-high"]);
  const mixed = low.map((value, at) => Math.round(value + (high[at] - value) * Math.min(1, Math.max(0, share))));
  return `rgb(${mixed.join(",")})`;
}

function parse(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}
