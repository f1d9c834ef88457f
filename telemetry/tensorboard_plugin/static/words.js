// The tooltip at the pointer, and announcements for screen readers.

import { sampleOf } from "./chart.js";
import { element, fill } from "./dom.js";
import { columnAt, valueAt } from "./field.js";
import { formatStep, formatValue } from "./format.js";
import { titleOf } from "./rows.js";
import { scaleText } from "./scale.js";
import { kindTitle } from "./alert_list.js";

const MARGIN = 6;

export class Tooltip {
  constructor() {
    // A popover is above dialogs, too.
    this.node = element("div", { class: "tooltip", role: "tooltip", popover: "manual" });
  }

  hide() {
    if (this.node.isConnected) this.node.hidePopover();
  }

  showGroup(path, isFolded, x, y) {
    const what = isFolded ? "click to unfold" : "click to fold";
    this.#show(x, y, element("b", {}, path), element("span", {}, what));
  }

  showCell(panel, cell, row, statistic, x, y) {
    const { field, values, scale } = panel.heatmap.content;
    const layer = panel.overview.layers[cell.layer];
    const value = valueAt(field, cell.layer, cell.step);
    const relative = scale.diverging ? valueAt({ ...field, values }, cell.layer, cell.step) : -1;
    const relation = relative >= 0 && relative < Infinity ? ` (${scaleText(scale, relative)})` : "";
    const name = row.folded
      ? `${row.folded} (${row.type}; here ${titleOf(layer)})`
      : titleOf(layer);
    this.#show(
      x,
      y,
      element("b", {}, name),
      element("span", {}, `${layer.type} · ${stepsText(field, cell)}`),
      element(
        "span",
        { class: Number.isFinite(value) ? "" : "nonfinite" },
        `${statistic.title}: ${formatValue(statistic, value)}${relation}`,
      ),
    );
  }

  /** @param {Object} found `title` or `step`; `lines`, each with `label`, `text` and a `color` */
  showLines({ title, step, lines }, x, y) {
    const row = (curve) => {
      const cells = [sampleOf(curve), curve.label, curve.text].map((part) => element("td", {}, part));
      return element("tr", { class: curve.isNearest ? "nearest" : "" }, ...cells);
    };
    const heading = title ?? `step ${formatStep(step)}`;
    this.#show(x, y, element("b", {}, heading), element("table", {}, ...lines.map(row)));
  }

  /** Shows it next to a point, inside of the window. */
  #show(x, y, ...content) {
    fill(this.node, ...content);
    this.node.hidePopover(); // a dialog may have opened since, which it is to be above
    this.node.showPopover();
    const { offsetWidth: width, offsetHeight: height } = this.node;
    const right = x + 16;
    const left = right + width > window.innerWidth ? x - width - 12 : right;
    const top = Math.min(y + 14, window.innerHeight - height - MARGIN);
    this.node.style.left = `${Math.max(left, MARGIN)}px`;
    this.node.style.top = `${Math.max(top, MARGIN)}px`;
  }
}

function stepsText(field, cell) {
  const next = field.steps[cell.column + 1];
  const step = `step ${formatStep(cell.step)}`;
  return next > cell.step + 1 ? `${step}, next measured at ${formatStep(next)}` : step;
}

export class Announcer {
  /** @param {import("./app.js").App} app */
  constructor(app) {
    this.app = app;
    this.node = element("p", { class: "announcer unseen", "aria-live": "polite" });
  }

  /** Announces the selected cell with its value, and the alert that led there. */
  selection(alert) {
    const { statistic, state, panels } = this.app;
    const { layer, step } = state;
    const parts = alert ? [alertAloud(alert)] : [];
    const panel = this.app.detailPanel();
    if (panels.length > 1 && panel) parts.push(`${panel.run}:`);
    if (layer !== null && panel) {
      const index = panel.overview.layers.findIndex((known) => known.name === layer);
      const field = panel.field(statistic); // undefined while it loads
      const column = field ? columnAt(field.steps, step) : -1;
      const at = field?.steps[column] ?? step; // the step at which it was measured
      const value = field ? `: ${formatValue(statistic, valueAt(field, index, step))}` : "";
      const of = at === step ? "" : ` (of step ${at})`;
      parts.push(`${titleOf(panel.overview.layers[index])}, step ${step}${value}${of}`);
    }
    this.node.textContent = parts.join(" ");
  }

  /** Announces alerts beyond the first `before`. */
  newAlerts(before) {
    const alerts = this.app.panels.flatMap((panel) => panel.alerts);
    const count = alerts.length - before;
    if (count <= 0) return;
    const last = alerts.reduce((a, b) => (b.step >= a.step ? b : a));
    const more = count > 1 ? `${count} new alerts, the last: ` : "New alert: ";
    this.node.textContent = more + alertAloud(last);
  }
}

function alertAloud({ severity, step, kind, module_name: layer }) {
  const where = layer ? ` in ${layer}` : "";
  return `${severity} at step ${formatStep(step)}: ${kindTitle(kind)}${where}.`;
}
