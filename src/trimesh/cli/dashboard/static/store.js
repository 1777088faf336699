// What the page shows now. One object, changed by `update`, after which the whole page is rendered anew.

export const store = {
  isList: false, // whether the runs are listed
  board: null, // what the run does, see board.py
  history: [], // sums of earlier looks, oldest first
  connection: "opening", // "open", "lost"
  tab: "overview",
  selected: "", // "procs:MESH:CELL", or a name
  colourBy: "state",
  filter: "",
  detail: null, // of what is selected
  call: null, // one call of the time line
  opened: "", // the problem whose detail is shown
  folded: false, // whether the problems are one line
  dialog: null, // { title, text, act } asks before an act; "keys" shows the keys
  said: "", // the last answer to an act
};

let draw = () => {};

/** Have `paint` called after each change. */
export function onChange(paint) {
  draw = paint;
}

/** Change what the page shows. */
export function update(some) {
  Object.assign(store, some);
  draw();
}
