// The side panel: a chosen alert, the layers that changed first, a layer in detail, all alerts.

import { close, select } from "./actions.js";
import { AlertList, AlertText } from "./alerts.js";
import { Detail } from "./detail.js";
import { formatNumber, formatStep } from "./format.js";
import { LayerName } from "./parts.js";
import { html } from "./preact.js";

export function Side({ page }) {
  const alert = page.chosenAlert;
  const run = page.panels.length > 1 ? page.current.name : null;
  return html`
    <button class="drawer-close" onclick=${() => close(page)}>Close</button>
    <section class="chosen-alert" aria-label="Chosen alert">
      ${alert && html`<div class="alert ${alert.severity}"><${AlertText} alert=${alert} run=${run} /></div>`}
    </section>
    <${Onsets} page=${page} />
    ${page.detailed && html`<${Detail} page=${page} />`}
    <${Hparams} page=${page} />
    <${AlertList} page=${page} />
  `;
}

/** The hyperparameters of the runs, the values in which two differ in bold. */
function Hparams({ page }) {
  const all = page.panels.map(({ overview }) => overview.hparams ?? {});
  const names = [...new Set(all.flatMap(Object.keys))];
  if (!names.length) return null;
  const text = (value) => (typeof value === "number" ? formatNumber(value) : String(value ?? "–"));
  const few = Object.keys(all[0]).map((name) => `${name} ${text(all[0][name])}`).join(" · ");
  const row = (name) => {
    const values = all.map((hparams) => text(hparams[name]));
    const style = new Set(values).size > 1 ? "strong" : "";
    return html`<tr><th scope="row">${name}</th>${values.map((value) => html`<td class=${style}>${value}</td>`)}</tr>`;
  };
  return html`<details class="hparams" open=${!page.source.isLive /* a report may be printed */}>
    <summary title=${few}><b>Hyperparameters</b><span class="muted"> ${few}</span></summary>
    <table><tbody>${names.map(row)}</tbody></table>
  </details>`;
}

const MOST = 8;

function Onsets({ page }) {
  const shown = page.onsetsShown();
  if (!shown?.answer || shown.answer.isUnknown) return null;
  const { step, answer } = shown;
  const onsets = answer.onsets?.filter(({ name }) => page.current.indexOf(name) >= 0) ?? [];
  const item = ({ name, step: at, factor }) => html`<li>
    <button onclick=${() => select(page, name, at)}>
      <${LayerName} name=${name || "the model"} />
      <span class="number">step ${formatStep(at)} · ${factorText(factor)}</span>
    </button>
  </li>`;
  return html`<section class="onsets" aria-label="Which layers changed first">
    <h2>Which layers changed first
      <span class="count">${onsets.length ? `${answer.count} of ${answer.layers} layers` : ""}</span></h2>
    <p class=${answer.error ? "failure" : "muted"}>${explanation(answer, onsets, formatStep(step))}</p>
    <ol>${onsets.slice(0, MOST).map(item)}</ol>
  </section>`;
}

function explanation({ error, onsets: found }, shown, step) {
  if (error) return error.message;
  if (found === null) return `Too few steps before step ${step} to know the usual range.`;
  if (!shown.length) return `No layer's gradient norm was unusual at step ${step}.`;
  return `Gradient norms out of their usual range by step ${step}, the earliest first.`;
}

/** A ratio to the usual norm as text. */
function factorText(value) {
  const factor = Number(value); // JSON has no infinity
  if (factor === Infinity) return "NaN or infinite";
  if (factor === 0) return "fell to 0";
  return factor >= 1 ? `${formatNumber(factor)}x above` : `${formatNumber(1 / factor)}x below`;
}
