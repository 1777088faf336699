// Where the cells of a mesh lie: rows and columns are its last two dimensions, the dimensions before them are grids side
// by side. A single long dimension, and a row that does not fit, go on below at a multiple of 8. A grid that is too high
// goes on in a block beside it.

// How cells are drawn, from small to large: squares, bars, bars with words.
const SQUARES = [5, 7, 9, 11, 13, 16, 20, 26, 32, 40].map((side) => ({ kind: "square", wide: side, high: side, most: side, cells: Infinity }));
export const HEAD = 22; // height of the words above the bars of a panel
export const WORD = 16; // height of a bar with words
export const BAR = 6; // height of a bar without
const modesOf = (bars) => [
  ...SQUARES,
  { kind: "bars", wide: 60, high: 12 + bars * BAR, most: 176, cells: 128 },
  { kind: "panel", wide: 130, high: 8 + HEAD + bars * WORD, most: 220, cells: 16 },
];

const LINE_MAX = 32; // cells of a single dimension in one line
const GAP = 14;
const INDEX = 15; // height of a line of indices
const DIGIT = 7;

/**
 * Return how the cells of a mesh lie.
 *
 * @param sizes extent of the mesh
 * @param cells how many there are
 * @param width, height room, in pixels
 * @param zoom steps nearer (or farther, below 0)
 * @param bars bars of a cell
 */
export function layOut(sizes, cells, width, height, zoom, bars) {
  const key = [sizes, cells, width, height, zoom, bars].join(";");
  if (!known.has(key)) {
    if (known.size > 100) known.clear();
    known.set(key, found(sizes, cells, width, height, zoom, bars));
  }
  return known.get(key);
}

const known = new Map(); // meshes keep their extent from board to board

function found(sizes, cells, width, height, zoom, bars) {
  const modes = modesOf(bars);
  let at = modes.length - 1;
  const fits = (mode) => {
    const one = arranged(sizes, cells, width, height, mode);
    return cells <= mode.cells && one.width <= width && one.height <= height && (mode.kind === "square" || !one.isWrapped);
  };
  while (at > 0 && !fits(modes[at])) at -= 1;
  at = Math.min(modes.length - 1, Math.max(0, at + zoom));
  const layout = arranged(sizes, cells, width, height, modes[at]);
  layout.xs = new Int32Array(cells);
  layout.ys = new Int32Array(cells);
  for (let cell = 0; cell < cells; cell += 1) [layout.xs[cell], layout.ys[cell]] = layout.place(cell);
  return layout;
}

function arranged(sizes, cells, width, height, mode) {
  const columns = Math.max(1, sizes.length ? sizes[sizes.length - 1] : 1);
  const rows = Math.max(1, sizes.length > 1 ? sizes[sizes.length - 2] : 1);
  const grids = Math.max(1, Math.ceil(cells / (columns * rows)));
  const isLine = sizes.length < 2;
  const isPanel = mode.kind === "panel";
  const left = isPanel && isLine ? 0 : String(Math.max(rows, isLine ? columns : 0) - 1).length * DIGIT + 6;
  const room = width - left;
  let across = columns; // cells of a line
  if (isLine && isPanel) {
    across = Math.ceil(columns / Math.ceil(columns / Math.max(1, Math.floor(width / mode.wide))));
  } else if (columns * mode.wide > room || (isLine && columns > LINE_MAX)) {
    const fit = Math.floor(room / mode.wide);
    across = Math.min(columns, Math.max(8, fit - (fit % 8)));
  }
  const isWrapped = !isLine && across < columns;
  const lines = Math.ceil(columns / across); // of a row
  const top = isPanel && isLine ? 0 : INDEX;
  const title = grids > 1 ? INDEX : 0;
  let wide = Math.min(mode.most, Math.max(mode.wide, Math.floor(room / across)));
  if (grids > 1) wide = mode.wide;
  const high = mode.high;
  let deep = rows; // rows of a block
  const beside = Math.max(1, Math.floor((width + GAP) / (left + across * wide + GAP)));
  if (grids === 1 && rows * lines * high > height && beside > 1) {
    deep = Math.ceil(rows / beside);
    deep = Math.min(rows, Math.ceil(deep / 8) * 8);
  }
  const perGrid = Math.ceil(rows / deep);
  const blocks = grids * perGrid;
  const blockWide = left + across * wide;
  const blockHigh = title + top + deep * lines * high;
  const inRow = Math.max(1, Math.min(blocks, beside));
  const corner = (block) => [(block % inRow) * (blockWide + GAP), Math.floor(block / inRow) * (blockHigh + GAP)];
  return {
    kind: mode.kind,
    wide,
    high,
    left,
    across,
    columns,
    rows,
    deep,
    lines,
    blocks,
    perGrid,
    isWrapped,
    isLine,
    width: inRow * (blockWide + GAP) - GAP,
    height: Math.ceil(blocks / inRow) * (blockHigh + GAP) - GAP,
    top,
    title,
    corner,
    /** Cells from one to the one below it. */
    down: isLine ? across : columns,
    /** Return the left upper corner of a cell. */
    place(cell) {
      const column = cell % columns;
      const row = Math.floor(cell / columns) % rows;
      const grid = Math.floor(cell / (columns * rows));
      const [x, y] = corner(grid * perGrid + Math.floor(row / deep));
      const line = (row % deep) * lines + Math.floor(column / across);
      return [x + left + (column % across) * wide, y + title + top + line * high];
    },
    /** Return the cell at a place, or -1. */
    cellAt(x, y) {
      const acrossBlock = Math.floor(x / (blockWide + GAP));
      const block = Math.floor(y / (blockHigh + GAP)) * inRow + acrossBlock;
      if (x < 0 || y < 0 || acrossBlock >= inRow || block >= blocks) return -1;
      const [left0, top0] = corner(block);
      const at = Math.floor((x - left0 - left) / wide);
      const line = Math.floor((y - top0 - title - top) / high);
      if (at < 0 || at >= across || line < 0 || line >= deep * lines) return -1;
      const column = (line % lines) * across + at;
      const row = (block % perGrid) * deep + Math.floor(line / lines);
      const cell = (Math.floor(block / perGrid) * rows + row) * columns + column;
      return column < columns && row < rows && cell < cells ? cell : -1;
    },
  };
}

/** Return the coordinates of a cell as text: "hosts=3,gpus=1". */
export function pointOf(grid, cell) {
  const places = [];
  for (let at = grid.sizes.length - 1; at >= 0; at -= 1) {
    places.unshift(`${grid.labels[at]}=${cell % grid.sizes[at]}`);
    cell = Math.floor(cell / grid.sizes[at]);
  }
  return places.join(",");
}

/** Return the name of the member of a cell. */
export function nameOf(grid, cell) {
  const point = pointOf(grid, cell);
  return point ? `${grid.name}[${point}]` : grid.name;
}

/** Return the cell of a member of this mesh by its name, or -1. */
export function cellOf(grid, name) {
  if (name === grid.name) return grid.letters.length === 1 ? 0 : -1;
  if (!name.startsWith(`${grid.name}[`) || !name.endsWith("]")) return -1;
  const places = name.slice(grid.name.length + 1, -1).split(",");
  if (places.length !== grid.labels.length) return -1;
  let cell = 0;
  for (let at = 0; at < places.length; at += 1) {
    const [label, place] = places[at].split("=");
    if (label !== grid.labels[at] || !(Number(place) < grid.sizes[at])) return -1;
    cell = cell * grid.sizes[at] + Number(place);
  }
  return cell;
}
