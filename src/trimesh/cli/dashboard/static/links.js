// Connections, memory that others may reach, versions of tensors.

import { html } from "./markup.js";
import { count, size } from "./format.js";
import { Name, Table } from "./table.js";

export function Links({ store }) {
  const { board, filter } = store;
  const has = (...names) => !filter || names.join(" ").includes(filter);
  return html`<h2>links, those that wait for a slow peer first</h2>
    <${Table}
      heads=${["from", "to", "#sent", "#received", "#bytes/s", "#bytes waiting here", "#waiting for room", "#dropped"]}
      rows=${board.links.filter((use) => has(use.proc, use.peer)).map(({ proc, peer, link, nbytes }) => [
        html`<${Name} name=${proc} />`, html`<${Name} name=${peer} />`, count(link.messages_sent), count(link.messages_received),
        size(nbytes), link.queued_bytes ? size(link.queued_bytes) : "", link.waiting || "", link.dropped_frames || "",
      ])}
    />
    <h2>memory that others may reach</h2>
    <${Table} heads=${["process", "what", "name", "#size"]} rows=${board.grants.filter((one) => has(one.proc, one.name)).map((one) => [one.proc, one.kind, one.name, size(one.nbytes)])} />
    <h2>versions of tensors</h2>
    <${Table}
      heads=${["process", "by", "#latest", "#slots", "pinned", "#size", "#readers", "#unread", "state"]}
      rows=${board.publications.filter((one) => has(one.proc, one.member)).map((one) => [
        one.proc, one.member, one.latest, one.slots, one.pins.map((pin) => `${pin.version} by ${pin.proc}`).join(", "), size(one.nbytes), one.readers.length,
        one.unread || "", one.is_waiting ? "a publish waits for readers" : "",
      ])}
    />`;
}
