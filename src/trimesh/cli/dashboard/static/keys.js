// The keyboard: all that the mouse does.

import { MEASURES } from "./cells.js";
import { store, update } from "./store.js";
import { TABS } from "./tabs.js";
import { idOf, open } from "./problems.js";

export const KEYS = [
  ["1 … 9, 0", "the tabs"],
  ["n p", "the next problem, the one before"],
  ["m", "into the meshes; again: the next mesh"],
  ["← ↑ ↓ →", "in a mesh: from rank to rank"],
  ["w", "in a mesh: to the next rank that is wrong"],
  ["+ − 0", "in a mesh: nearer, farther, all of it"],
  ["← → + − 0", "in the time line: earlier, later, nearer, farther, follow"],
  ["c", "colour by the next measure"],
  ["/", "filter"],
  ["Escape", "close details"],
  ["?", "these keys"],
];

/** Take the keys that no field takes. */
export function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || !store.board || store.dialog) return;
    const isTyping = event.target.matches("input:not([type=radio]), select, textarea");
    if (event.key === "Escape") {
      if (isTyping) event.target.blur();
      update({ selected: "", detail: null, opened: "", call: null, filter: "", said: "" });
    } else if (isTyping) {
      return;
    } else if (/^[0-9]$/.test(event.key)) {
      update({ tab: TABS[(Number(event.key) + 9) % 10].key });
    } else if (event.key === "n" || event.key === "p") {
      toProblem(event.key === "n" ? 1 : -1);
    } else if (event.key === "m") {
      toMesh();
    } else if (event.key === "c") {
      const all = Object.keys(MEASURES);
      update({ colourBy: all[(all.indexOf(store.colourBy) + 1) % all.length] });
    } else if (event.key === "/") {
      document.querySelector("#filter").focus();
    } else if (event.key === "?") {
      update({ dialog: "keys" });
    } else {
      return;
    }
    event.preventDefault();
  });
}

function toProblem(step) {
  const { problems } = store.board;
  if (!problems.length) return;
  const ids = problems.map(idOf);
  const now = ids.indexOf(store.opened);
  const next = now < 0 ? 0 : (now + step + ids.length) % ids.length;
  open(problems[next]);
  document.querySelectorAll(".problem")[next].focus();
}

function toMesh() {
  if (store.tab !== "overview") {
    update({ tab: "overview" });
    requestAnimationFrame(toMesh); // they are drawn once their width is known
    return;
  }
  const all = [...document.querySelectorAll(".cells")];
  const now = all.indexOf(document.activeElement);
  if (all.length) all[(now + 1) % all.length].focus();
}
