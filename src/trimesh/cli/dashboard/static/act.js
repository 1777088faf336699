// Acts are asked for twice: what is killed or cancelled does not come back.

import { html, useLayoutEffect, useRef } from "./markup.js";
import { act } from "./run.js";
import { store, update } from "./store.js";
import { KEYS } from "./keys.js";

/** Ask whether an act is meant, then have it done. */
export function confirmed(what, target, title, text) {
  update({ dialog: { what, target, title, text } });
}

async function perform({ what, target, title }) {
  update({ dialog: null });
  try {
    await act(what, target);
    update({ said: `${title.replace("?", "")}: requested.` });
  } catch (error) {
    update({ said: error.message });
  }
}

export function Dialog({ dialog }) {
  const box = useRef(null);
  useLayoutEffect(() => {
    if (dialog && !box.current.open) box.current.showModal();
    if (!dialog && box.current.open) box.current.close();
  }, [dialog]);
  const close = () => store.dialog && update({ dialog: null });
  return html`<dialog ref=${box} onClose=${close} aria-label=${dialog === "keys" ? "keys" : dialog ? dialog.title : "closed"}>
    ${dialog === "keys" &&
    html`<h2>Keys</h2>
      <dl class="keys">${KEYS.map(([keys, text]) => html`<dt key=${keys}><kbd>${keys}</kbd></dt><dd>${text}</dd>`)}</dl>
      <button type="button" onClick=${close}>close</button>`}
    ${dialog &&
    dialog !== "keys" &&
    html`<h2>${dialog.title}</h2>
      <p>${dialog.text}</p>
      <p class="buttons">
        <button type="button" onClick=${close}>no</button>
        <button type="button" class="danger" id="yes" onClick=${() => perform(dialog)}>yes, ${dialog.what}</button>
      </p>`}
  </dialog>`;
}
