// Hosts: a card of each machine with its figures and those of the run there; below them the processes.

import { html, useEffect, useState } from "./markup.js";
import { ask } from "./run.js";
import { Sample } from "./meshes.js";
import { LETTERS_OF } from "./cells.js";
import { Name, Table } from "./table.js";
import { clock, count, many, rounded, size, sizeOf } from "./format.js";

const NEARLY = 0.95; // a share of memory or of a file system from which it counts as full

let kept = { hosts: [], hosts_left_out: 0, procs: [], left_out: 0 };

export function Hosts({ store }) {
  const [sort, setSort] = useState("memory");
  const [, setTurn] = useState(0);
  const [error, setError] = useState("");
  const { board, filter } = store;
  useEffect(() => {
    ask("hosts", { sort, name: filter }).then(
      (found) => {
        kept = found;
        setError("");
        setTurn((turn) => turn + 1);
      },
      (problem) => setError(problem.message),
    );
  }, [board.number, sort, filter]);
  const key = `${board.state} ${store.scheme} ${sort}`;
  if (kept.key !== key) { // an answer is drawn once: not again by a board that comes before the next one
    kept.key = key;
    kept.drawn = drawn(board.state === "live", store.scheme, sort, setSort);
  }
  return html`${error && board.state === "live" && html`<p class="cut">${error}</p>`}${kept.drawn}`;
}

function drawn(isLive, scheme, sort, setSort) {
  const hasGpus = kept.hosts.some((one) => one.gpu_memory);
  const gpu = (one) => (hasGpus ? [one.gpu_memory ? `${one.gpu} %` : "", one.gpu_memory ? size(one.gpu_memory) : ""] : []);
  return html`<div class="hosts">${kept.hosts.map((one) => html`<${Host} key=${one.machine.host.name} use=${one} isLive=${isLive} />`)}</div>
    ${kept.hosts_left_out > 0 && html`<p class="dim">${count(kept.hosts_left_out)} more hosts are not shown: filter</p>`}
    <h2>processes ${kept.left_out > 0 && html`<span class="dim">${count(kept.left_out)} more are not shown: sort or filter</span>`}</h2>
    <${Table}
      heads=${["process", "host", "#pid", "state", "#CPU", "#memory", ...(hasGpus ? ["#GPU", "#GPU memory"] : []), "#network/s"]}
      sorts=${["name", "host", "", "", "cpu", "memory", ...(hasGpus ? ["gpu", ""] : []), "nbytes"]}
      sort=${sort}
      onSort=${setSort}
      rows=${kept.procs.map((one) => [
        html`<${Name} name=${one.name} />`, one.host || "this host", one.pid, html`<${Sample} letter=${LETTERS_OF[one.state] || "r"} scheme=${scheme} /> ${one.state}`,
        `${Math.round(one.cpu * 100)} %`, size(one.memory), ...gpu(one), size(one.nbytes),
      ])}
    />`;
}

function Host({ use, isLive }) {
  const { host, cpu, received, sent } = use.machine;
  const used = host.memory_bytes - host.memory_free_bytes;
  return html`<section class="card host" aria-label=${`host ${host.name || "this host"}`}>
    <header><h2>${host.name || "this host"}</h2>${isLive && html`<${State} host=${host} />`}
      ${host.at > 0 && ["silent", "lost"].includes(host.agent) && html`<span class="dim">as last seen at ${clock(host.at)}</span>`}
    </header>
    ${host.at > 0 && html`<dl>
      <${Figure} name="CPU" share=${cpu === null ? null : cpu / host.cpus} text=${`${cpu === null ? "–" : rounded(cpu)} of ${many(host.cpus, "core")}`} />
      <${Figure} name="memory" share=${used / host.memory_bytes} most=${NEARLY} text=${sizeOf(used, host.memory_bytes)} />
      ${host.gpus.map((gpu, at) => html`<${Figure} key=${at} name=${`GPU ${gpu.index}`} title=${gpu.name} share=${gpu.percent < 0 ? null : gpu.percent / 100} text=${gpuText(gpu)} />`)}
      ${host.disks.map((disk) => html`<${Figure} key=${disk.path} name=${disk.path} share=${1 - disk.free_bytes / disk.nbytes} most=${NEARLY} text=${`${size(disk.free_bytes)} free of ${size(disk.nbytes)}`} />`)}
      <${Figure} name="network" text=${received === null ? "–" : `${size(received)}/s in, ${size(sent)}/s out`} />
    </dl>`}
    <p><b>this run:</b> ${runText(use)}</p>
    <p class="dim">${[agentText(host), versions(host)].filter(Boolean).join(" · ")}</p>
  </section>`;
}

function Figure({ name, title, share = null, most = 2, text }) {
  return html`<dt title=${title}>${name}</dt>
    <dd>
      ${share !== null && html`<span class=${`bar ${share >= most ? "full" : ""}`} aria-hidden="true"><span style=${{ width: `${Math.min(100, Math.max(0, 100 * share))}%` }}></span></span>`}
      <span class=${share >= most ? "wrong" : ""}>${text}</span>
    </dd>`;
}

function gpuText({ percent, used_bytes: used, memory_bytes: memory, celsius }) {
  return [percent < 0 ? "" : `${percent} %`, sizeOf(used, memory), celsius < 0 ? "" : `${celsius} °C`].filter(Boolean).join(", ");
}

function runText(use) {
  const { host } = use.machine;
  if (!host.procs) return "no process";
  const parts = [`${many(host.procs, "process")}${host.failed ? `, ${count(host.failed)} not running` : ""}`];
  if (host.failed === host.procs && !use.memory) return parts[0];
  parts.push(`${rounded(use.cpu)} cores`, size(use.memory));
  if (use.gpu_memory) parts.push(`${size(use.gpu_memory)} on GPUs`);
  return [...parts, `${size(use.nbytes)}/s on links`].map((part) => part.replaceAll(" ", "\u00a0")).join(", ");
}

function agentText({ agent, pid }) {
  return agent ? (pid ? `agent ${pid} ${agent}` : "") : pid ? `controller ${pid}` : "";
}

function versions({ trimesh, python, torch, kernel }) {
  if (!kernel) return "";
  return [`trimesh ${trimesh}`, `Python ${python}`, ...torch.map((one) => `torch ${one}`), `Linux ${kernel}`].join(" · ");
}

function State({ host }) {
  const parts = [];
  if (host.agent === "lost") parts.push(html`<span class="wrong">lost: ${host.said}</span>`);
  else if (host.agent === "silent" || host.state === "silent") parts.push(html`<span class="wrong">its agent does not answer</span>`);
  else if (host.procs && host.failed === host.procs) parts.push(html`<span class="wrong">no process runs</span>`);
  else parts.push(html`<span>${host.state}</span>`);
  if (host.is_insecure) parts.push(html`<span class="wrong">without TLS</span>`);
  return parts;
}
