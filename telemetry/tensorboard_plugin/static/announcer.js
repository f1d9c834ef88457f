// Says aloud, for assistive technology, what is selected and what is new.

import { kindTitle } from "./alert_list.js";
import { element } from "./dom.js";
import { valueAt } from "./field.js";
import { formatStep, formatValue } from "./format.js";
import { titleOf } from "./rows.js";

export class Announcer {
  /** @param {import("./app.js").App} app */
  constructor(app) {
    this.app = app;
    this.node = element("p", { class: "announcer unseen", "aria-live": "polite" });
  }

  /** The selected cell with its value, and the alert that led there: each time all is read out. */
  selection(alert) {
    const { statistic, state, panels } = this.app;
    const { layer, step } = state;
    const parts = alert ? [alertAloud(alert)] : [];
    const panel = this.app.detailPanel();
    if (panels.length > 1 && panel) parts.push(`${panel.run}:`);
    if (layer !== null && panel) {
      const index = panel.overview.layers.findIndex((known) => known.name === layer);
      const value = formatValue(statistic, valueAt(panel.field(statistic), index, step));
      parts.push(`${titleOf(panel.overview.layers[index])}, step ${step}: ${value}`);
    }
    this.node.textContent = parts.join(" ");
  }

  /** That there are more alerts than `before`. */
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
