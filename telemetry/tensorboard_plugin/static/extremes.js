// Layers in which a statistic is far from what is usual: too little, or too much.

import { element, fill } from "./dom.js";
import { columnAt, rowOf } from "./field.js";
import { formatNumber, formatStep, formatValue } from "./format.js";
import { titleOf } from "./rows.js";

const FAR = 10; // times what is usual
const MOST = 6;
const MUCH = 0.5; // of a share

export class Extremes {
  /** @param {(layer: string, step: number) => void} onChoose */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.node = element("section", { class: "extremes", "aria-label": "Too little, too much" });
  }

  /** Shows those of a run at a step, if there are any. */
  show(panel, statistic, step) {
    const field = panel.field(statistic);
    const column = field ? columnAt(field.steps, step) : -1;
    const key = [statistic.name, column];
    if (field === this.field && key.every((part, i) => part === this.key[i])) return;
    [this.field, this.key] = [field, key];
    const values = panel.overview.layers.flatMap((layer, index) => {
      const row = rowOf(field, index);
      const value = row < 0 || column < 0 ? -1 : field.values[column * field.rows + row];
      return value >= 0 ? [{ layer, value }] : [];
    });
    const { low, high, said } = limitsOf(statistic, values.map(({ value }) => value));
    const by = (sign) => (a, b) => sign * (a.value - b.value);
    const few = values.filter(({ value }) => value < low).sort(by(1));
    const many = values.filter(({ value }) => value > high).sort(by(-1));
    this.node.hidden = !few.length && !many.length;
    if (this.node.hidden) return fill(this.node);
    const list = (title, meaning, found) => this.#list(title, meaning, found, statistic, step);
    fill(
      this.node,
      element("h2", {}, statistic.title, element("span", { class: "count" }, `at step ${formatStep(field.steps[column])}`)),
      element("p", { class: "muted" }, said),
      list("Too little", statistic.tooLittle, few),
      list("Too much", statistic.tooMuch, many),
    );
  }

  #list(title, meaning, found, statistic, step) {
    if (!found.length) return null;
    const item = ({ layer, value }) =>
      element(
        "li",
        {},
        element(
          "button",
          { onclick: () => this.onChoose(layer.name, step) },
          element("span", { class: "alert-layer" }, titleOf(layer)),
          element("span", { class: "number" }, formatValue(statistic, value)),
        ),
      );
    return element(
      "div",
      {},
      element("h3", {}, `${title}: ${found.length}`),
      meaning ? element("p", { class: "muted" }, `It may mean: ${meaning}.`) : null,
      element("ol", {}, ...found.slice(0, MOST).map(item)),
      found.length > MOST ? element("p", { class: "muted" }, `and ${found.length - MOST} more`) : null,
    );
  }
}

/** Between which values a statistic is usual, as far as that is known, and in words. */
function limitsOf({ unit, log, usual }, values) {
  if (unit === "share") return { low: -1, high: MUCH, said: `Usual: up to ${100 * MUCH} %.` };
  if (!log) return { low: -1, high: Infinity, said: "" };
  const positive = values.filter((value) => value > 0 && value < Infinity).sort((a, b) => a - b);
  const middle = usual ?? positive[positive.length >> 1] ?? 0;
  const what = usual == null ? "the median of the layers above zero" : "usual";
  return {
    low: middle / FAR,
    high: middle * FAR,
    said: `Within ${FAR} times of ${formatNumber(middle)}, ${what}.`,
  };
}
