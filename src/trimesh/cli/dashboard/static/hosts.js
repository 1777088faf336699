// Hosts and what the processes of the run use there; below them the processes.

import { html, useEffect, useState } from "./markup.js";
import { ask } from "./run.js";
import { Sample } from "./meshes.js";
import { LETTERS_OF } from "./cells.js";
import { Name, Table } from "./table.js";
import { count, rounded, size } from "./format.js";

let kept = { hosts: [], procs: [], left_out: 0 };

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
  const hasGpus = kept.hosts.some((one) => one.gpu_memory);
  const gpu = (one) => (hasGpus ? [one.gpu_memory ? `${one.gpu} %` : "", one.gpu_memory ? size(one.gpu_memory) : ""] : []);
  return html`${error && board.state === "live" && html`<p class="cut">${error}</p>`}
    <${Table}
      heads=${["host", "state", "#processes", "#not running", "#CPU, in cores", "#memory", ...(hasGpus ? ["#GPU", "#GPU memory"] : []), "#network/s", "session"]}
      rows=${kept.hosts.map((one) => [
        one.host.name || "this host", html`<${State} host=${one.host} />`,
        count(one.host.procs), one.host.failed || "", rounded(one.cpu), size(one.memory), ...gpu(one), size(one.nbytes),
        one.host.is_insecure ? html`<span class="wrong">without TLS</span>` : "",
      ])}
    />
    <h2>processes ${kept.left_out > 0 && html`<span class="dim">${count(kept.left_out)} more are not shown: sort or filter</span>`}</h2>
    <${Table}
      heads=${["process", "host", "#pid", "state", "#CPU", "#memory", ...(hasGpus ? ["#GPU", "#GPU memory"] : []), "#network/s"]}
      sorts=${["name", "host", "", "", "cpu", "memory", ...(hasGpus ? ["gpu", ""] : []), "nbytes"]}
      sort=${sort}
      onSort=${setSort}
      rows=${kept.procs.map((one) => [
        html`<${Name} name=${one.name} />`, one.host || "this host", one.pid, html`<${Sample} letter=${LETTERS_OF[one.state] || "r"} scheme=${store.scheme} /> ${one.state}`,
        `${Math.round(one.cpu * 100)} %`, size(one.memory), ...gpu(one), size(one.nbytes),
      ])}
    />`;
}

function State({ host }) {
  if (host.state === "silent") return html`<span class="wrong">does not answer</span>`;
  if (host.failed === host.procs) return html`<span class="wrong">no process runs</span>`;
  return host.state;
}
