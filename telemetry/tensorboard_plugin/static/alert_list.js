// All alerts, newest first, with filters; a click jumps to the cell.

import { dropDown, element, fill, layerName } from "./dom.js";
import { formatStep } from "./format.js";

export class AlertList {
  /** @param {(alert: Object) => void} onChoose */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.kind = "";
    this.severity = "";
    this.node = element("section", { class: "alerts", "aria-label": "Alerts" });
    this.alerts = [];
    this.lists = [];
  }

  /** @param {Object[]} panels whose alerts are listed, with the run if there are several */
  show(panels, chosen) {
    const lists = panels.map((panel) => panel.alerts);
    const isSame = lists.length === this.lists.length && lists.every((l, i) => l === this.lists[i]);
    if (isSame && chosen === this.chosen) return;
    this.lists = lists;
    this.chosen = chosen;
    this.alerts = panels.flatMap((panel) =>
      panel.alerts.map((alert) => ({ alert, run: panels.length > 1 ? panel.run : null })),
    );
    this.#draw();
  }

  #draw() {
    const { alerts } = this;
    const kinds = [...new Set(alerts.map(({ alert }) => alert.kind))].sort();
    const shown = alerts
      .filter(({ alert }) => !this.kind || alert.kind === this.kind)
      .filter(({ alert }) => !this.severity || alert.severity === this.severity)
      .sort((a, b) => b.alert.step - a.alert.step);
    const count =
      shown.length === alerts.length ? alerts.length : `${shown.length} of ${alerts.length}`;
    fill(
      this.node,
      element("h2", {}, "Alerts", element("span", { class: "count" }, alerts.length ? `${count}` : "none")),
      alerts.length
        ? this.#filters(kinds)
        : element("p", { class: "muted" }, "No alerts in this run yet."),
      element("ul", {}, ...shown.map((item, index) => this.#item(item, index))),
    );
  }

  #filters(kinds) {
    const set = (name) => (value) => {
      this[name] = value;
      this.#draw();
    };
    return element(
      "div",
      { class: "filters" },
      dropDown("Kind", [["", "all"], ...kinds.map((kind) => [kind, kindTitle(kind)])], this.kind, set("kind")),
      dropDown(
        "Severity",
        [["", "all"], ["error", "errors"], ["warning", "warnings"], ["note", "notes"]],
        this.severity,
        set("severity"),
      ),
    );
  }

  #item({ alert, run }, index) {
    return element(
      "li",
      {},
      element(
        "button",
        {
          class: `alert ${alert.severity}`,
          dataset: { key: `alert ${index}` },
          "aria-pressed": alert === this.chosen ? "true" : "false",
          onclick: () => this.onChoose(alert),
        },
        // The chosen one is written out above.
        ...alertText(alert, run).filter((part, i, all) => alert !== this.chosen || i < all.length - 1),
      ),
    );
  }
}

/** An alert in a few lines, with the run it is of. */
export function alertText(alert, run = null) {
  const severity = element("span", { class: "severity" }, alert.severity); // also for those who see no color
  return [
    element(
      "span",
      { class: "alert-head" },
      element("b", {}, alertTitle(alert), severity),
      element("span", {}, `step ${formatStep(alert.step)}`),
    ),
    run ? element("span", { class: "muted" }, run) : null,
    alert.module_name ? layerName(alert.module_name) : null,
    alert.observed_in ? layerName(`observed in ${alert.observed_in}`) : null,
    element("span", { class: "alert-message" }, alert.message),
  ].filter((part) => part !== null);
}

/** Kind and stage; of an escalated alert, the consequence that escalated it. */
export function alertTitle({ kind, stage, consequences }) {
  const latest = consequences.at(-1);
  const now = stage === "escalated" ? (latest ? `, now: ${faultText(latest)}` : ", escalated") : "";
  return kindTitle(kind) + (stage === "resolved" ? ", resolved" : now);
}

/** A kind of fault and its layer, within a sentence. */
function faultText({ kind, module_name: layer }) {
  const title = kindTitle(kind);
  const name = title.startsWith("NaN") ? title : title.charAt(0).toLowerCase() + title.slice(1);
  return layer ? `${name} in ${layer}` : name;
}

/** A kind of alert as a title. */
export function kindTitle(kind) {
  const text = kind === "nonfinite" ? "NaN or infinity" : kind.replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** The layers that an alert names: the culprit, where it was observed, and, until it resolves, the consequences. */
export function layersOf({ module_name: culprit, observed_in: observed, stage, consequences }) {
  return [culprit, observed, ...(stage === "resolved" ? [] : consequences.map((known) => known.module_name))];
}
