// Who waits for whom, as boxes and arrows: what waits stands left of what it waits for. The thick boxes are what all
// others wait for in the end; double arrows go round.

import { html } from "./markup.js";
import { duration } from "./format.js";
import { selectByName } from "./detail.js";

const WIDE = 270;
const HIGH = 64;
const ACROSS = 70;
const DOWN = 18;

export function Waits({ store }) {
  const { boxes, arrows, left_out: leftOut } = store.board.waits;
  if (!boxes.length) return html`<p class="dim">no call waits for another one</p>`;
  const filled = [];
  const edge = arrows.some(([start, end]) => boxes[end].column <= boxes[start].column) ? 60 : 10; // room for what goes back
  const places = boxes.map((box) => {
    filled[box.column] = (filled[box.column] || 0) + 1;
    return [edge + box.column * (WIDE + ACROSS), 24 + (filled[box.column] - 1) * (HIGH + DOWN)];
  });
  const width = edge + filled.length * (WIDE + ACROSS);
  const height = 64 + Math.max(...filled.map((number) => number || 0)) * (HIGH + DOWN);
  return html`<div class="picture">
    ${leftOut > 0 && html`<p class="cut">${leftOut} boxes are not shown</p>`}
    <svg width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="group" aria-label="who waits for whom">
      <defs>
        ${["head", "round-head"].map(
          (id) => html`<marker key=${id} id=${id} viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" markerWidth="12" markerHeight="12" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" class=${id} /></marker>`,
        )}
      </defs>
      ${arrows.map(([start, end, many]) => html`<${Arrow} key=${`${start} ${end}`} from=${places[start]} to=${places[end]} many=${many} round=${boxes[start].in_circle && boxes[end].in_circle} />`)}
      ${boxes.map((box, at) => html`<${Box} key=${box.call} box=${box} place=${places[at]} />`)}
    </svg>
  </div>`;
}

function Arrow({ from, to, many, round }) {
  const [x1, y1] = [from[0] + WIDE, from[1] + HIGH / 2];
  const [x2, y2] = [to[0], to[1] + HIGH / 2];
  const isBack = x2 <= x1 - 1;
  const away = isBack ? 60 : Math.max(30, (x2 - x1) / 2);
  const path = isBack
    ? `M${x1} ${y1 + 12}C${x1 + away} ${y1 + 12 + away} ${x2 - away} ${y2 + 12 + away} ${x2} ${y2 + 12}`
    : `M${x1} ${y1}C${x1 + away} ${y1} ${x2 - away} ${y2} ${x2} ${y2}`;
  return html`<g class=${round ? "arrow round" : "arrow"}>
    <path d=${path} marker-end=${round ? "url(#round-head)" : "url(#head)"} />
    ${many > 1 && html`<text x=${(x1 + x2) / 2 - 10} y=${(y1 + y2) / 2 - 6}>×${many}</text>`}
  </g>`;
}

function Box({ box, place: [x, y] }) {
  const kind = box.in_circle ? "in-circle" : box.is_culprit ? "culprit" : "";
  const words = box.in_circle ? "waits for itself" : box.is_culprit ? `${box.waiters} wait for it` : "";
  const open = () => selectByName(box.name);
  const left = box.left === null ? "" : ` · ${box.left > 0 ? `${duration(box.left)} left` : "deadline over"}`;
  return html`<g
    class=${`box ${kind}`}
    transform=${`translate(${x} ${y})`}
    tabindex="0"
    role="button"
    aria-label=${`${box.name}.${box.endpoint}, ${box.state} for ${duration(box.age)}, ${words}`}
    onClick=${open}
    onKeyDown=${(event) => event.key === "Enter" && open()}
  >
    <rect width=${WIDE} height=${HIGH} rx="3" />
    ${kind && html`<rect class="inner" x="3" y="3" width=${WIDE - 6} height=${HIGH - 6} rx="2" />`}
    <title>${`${box.name}.${box.endpoint}\n${box.at}`}</title>
    <text class="who" x="10" y="19">${cut(`${box.name}.${box.endpoint}`, 32)}${box.count > 1 ? ` ×${box.count}` : ""}</text>
    <text x="10" y="36">${box.state} · ${duration(box.age)}${left}</text>
    <text class="dim" x="10" y="53">${words || cut(lineOf(box.at), 40)}</text>
  </g>`;
}

function lineOf(at) {
  const found = /File "(?:.*\/)?([^/"]+)", line (\d+), in (.*)/.exec(at);
  return found ? `${found[1]}:${found[2]} ${found[3]}` : at;
}

function cut(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
