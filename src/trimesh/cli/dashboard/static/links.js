// Connections, memory that others may reach, versions of tensors, hosts, and who has most memory.

import { html } from "./markup.js";
import { count, size } from "./format.js";
import { selectByName } from "./detail.js";

export function Links({ store }) {
  const { board, filter } = store;
  const has = (...names) => !filter || names.join(" ").includes(filter);
  return html`<h3>links, those that wait for a slow peer first</h3>
    <${Table}
      heads=${["from", "to", "#sent", "#received", "#bytes/s", "#bytes waiting here", "#waiting for room", "#dropped"]}
      rows=${board.links.filter((use) => has(use.proc, use.peer)).map(({ proc, peer, link, nbytes }) => [
        html`<${Name} name=${proc} />`, html`<${Name} name=${peer} />`, count(link.messages_sent), count(link.messages_received),
        size(nbytes), link.queued_bytes ? size(link.queued_bytes) : "", link.waiting || "", link.dropped_frames || "",
      ])}
    />
    <h3>memory of processes</h3>
    <${Table} heads=${["process", "#resident"]} rows=${board.largest.filter(([name]) => has(name)).map(([name, bytes]) => [html`<${Name} name=${name} />`, size(bytes)])} />
    <h3>memory that others may reach</h3>
    <${Table} heads=${["process", "what", "name", "#size"]} rows=${board.grants.filter((one) => has(one.proc, one.name)).map((one) => [one.proc, one.kind, one.name, size(one.nbytes)])} />
    <h3>versions of tensors</h3>
    <${Table}
      heads=${["process", "by", "#latest", "#slots", "pinned", "#size", "#readers", "#unread", ""]}
      rows=${board.publications.filter((one) => has(one.proc, one.member)).map((one) => [
        one.proc, one.member, one.latest, one.slots, one.pins.map((pin) => `${pin.version} by ${pin.proc}`).join(", "), size(one.nbytes), one.readers.length,
        one.unread || "", one.is_waiting ? "a publish waits for readers" : "",
      ])}
    />
    <h3>hosts</h3>
    <${Table} heads=${["host", "#processes", "#that do not run", "connection"]} rows=${board.hosts.filter((one) => has(one.name)).map((one) => [one.name || "this host", one.procs, one.failed || "", one.state === "silent" ? "does not answer" : one.is_insecure ? "INSECURE: without TLS" : ""])} />`;
}

function Name({ name }) {
  return html`<button type="button" class="link" onClick=${() => selectByName(name)}>${name}</button>`;
}

function Table({ heads, rows }) {
  if (!rows.length) return html`<p class="dim">none</p>`;
  const kinds = heads.map((head) => (head.startsWith("#") ? "number" : ""));
  return html`<table>
    <thead><tr>${heads.map((head, at) => html`<th key=${at} class=${kinds[at]}>${head.replace("#", "")}</th>`)}</tr></thead>
    <tbody>${rows.map((row, number) => html`<tr key=${number}>${row.map((cell, at) => html`<td key=${at} class=${kinds[at]}>${cell}</td>`)}</tr>`)}</tbody>
  </table>`;
}
