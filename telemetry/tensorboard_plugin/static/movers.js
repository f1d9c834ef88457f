// Which layers left their past first around a step, as the server finds from gradient norms.

import { element, fill } from "./dom.js";
import { formatNumber, formatStep } from "./format.js";

const MOST = 8;

export class Movers {
  /** @param {(layer: string, step: number) => void} onChoose */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.node = element("section", { class: "movers", "aria-label": "Who moved first" });
    this.request = 0;
  }

  /** Loads what a source knows about a step; later answers to earlier questions are ignored. */
  async load(source, run, step) {
    const request = ++this.request;
    this.data = null;
    const found = await source.movers(run, step).catch((error) => ({ error: error.message }));
    if (request === this.request) this.data = { run, step, ...found };
  }

  clear() {
    this.request++;
    this.data = null;
  }

  /** Shows what was loaded, if it is of this run. */
  show(run, layers) {
    const { data } = this;
    this.node.hidden = !data || data.run !== run || data.isUnknown;
    if (this.node.hidden) return;
    const known = new Set(layers.map((layer) => layer.name));
    const shown = data.movers?.filter((mover) => known.has(mover.name)) ?? [];
    fill(
      this.node,
      element("h2", {}, "Who moved first", element("span", { class: "count" }, countText(data, shown))),
      element("p", { class: data.error ? "failure" : "muted" }, explanation(data, shown)),
      element("ol", {}, ...shown.slice(0, MOST).map((mover) => this.#item(mover))),
    );
  }

  #item(mover) {
    return element(
      "li",
      {},
      element(
        "button",
        { onclick: () => this.onChoose(mover.name, mover.step) },
        element("span", { class: "alert-layer" }, mover.name || "the model"),
        element("span", { class: "when" }, `step ${formatStep(mover.step)} · ${factorText(mover.factor)}`),
      ),
    );
  }
}

function countText(data, shown) {
  return shown.length ? `${data.count} of ${data.layers} layers` : "";
}

function explanation(data, shown) {
  if (data.error) return data.error;
  const step = formatStep(data.step);
  if (data.movers === null) return `Too few steps before step ${step} to know what is usual.`;
  if (!shown.length) return `No layer's gradient norm was unusual at step ${step}.`;
  return `Gradient norms that had left their own past by step ${step}, the earliest first.`;
}

/** A ratio to the usual norm in words. */
function factorText(value) {
  const factor = Number(value); // JSON has no infinity
  if (factor === Infinity) return "NaN or infinite";
  if (factor === 0) return "fell to 0";
  return factor >= 1 ? `× ${formatNumber(factor)}` : `÷ ${formatNumber(1 / factor)}`;
}
