// Where the cells of a mesh lie: its last label runs to the right, rows of it are set side by side as far as they fit.

const SIDES = [160, 112, 72, 48, 32, 26, 20, 16, 13, 11, 9, 7, 5];
const USUAL = 5; // not larger than this without zoom

/**
 * Return how the cells of a mesh lie.
 *
 * @param sizes extent of the mesh
 * @param cells how many there are
 * @param width, height room, in pixels
 * @param zoom steps nearer (or farther, below 0)
 */
export function layOut(sizes, cells, width, height, zoom) {
  let at = USUAL;
  while (at < SIDES.length - 1 && arranged(sizes, cells, width, SIDES[at]).height > height) at += 1;
  at = Math.min(SIDES.length - 1, Math.max(0, at - zoom));
  return arranged(sizes, cells, width, SIDES[at]);
}

function arranged(sizes, cells, width, side) {
  const last = sizes.length ? sizes[sizes.length - 1] : 1;
  const gap = Math.max(4, Math.round(side / 2));
  let strip = sizes.length > 1 && last * side <= width ? last : 0; // 0: cells run on from row to row
  let across = strip ? Math.max(1, Math.floor((width + gap) / (strip * side + gap))) : 1;
  if (!strip) {
    strip = Math.max(1, Math.floor(width / side));
    if (strip > 8) strip -= strip % 8;
    strip = Math.min(strip, Math.max(1, cells));
  }
  const rows = Math.ceil(cells / (strip * across));
  const pitch = strip * side + gap;
  return {
    side,
    columns: strip * across,
    strip,
    rows,
    width: across * pitch - gap,
    height: rows * side,
    /** Return the left upper corner of a cell. */
    place(cell) {
      const column = cell % (strip * across);
      return [Math.floor(column / strip) * pitch + (column % strip) * side, Math.floor(cell / (strip * across)) * side];
    },
    /** Return the cell at a place, or -1. */
    cellAt(x, y) {
      const block = Math.floor(x / pitch);
      const inside = Math.floor((x - block * pitch) / side);
      const row = Math.floor(y / side);
      if (x < 0 || y < 0 || block >= across || inside >= strip || row >= rows) return -1;
      const cell = row * strip * across + block * strip + inside;
      return cell < cells ? cell : -1;
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
