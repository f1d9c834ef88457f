// All alerts, newest first, with filters; a click jumps to the cell.

import { dropDown, element, fill } from "./dom.js";
import { formatStep } from "./format.js";

export class AlertList {
  /** @param {(alert: Object) => void} onChoose */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.kind = "";
    this.severity = "";
    this.node = element("section", { class: "alerts", "aria-label": "Alerts" });
    this.alerts = [];
  }

  /** @param {Object[]} alerts each with the `run` it is of, if there are several */
  show(alerts, chosen) {
    this.alerts = alerts;
    this.chosen = chosen;
    this.#draw();
  }

  #draw() {
    const { alerts } = this;
    const kinds = [...new Set(alerts.map((alert) => alert.kind))].sort();
    const shown = alerts
      .filter((alert) => !this.kind || alert.kind === this.kind)
      .filter((alert) => !this.severity || alert.severity === this.severity)
      .sort((a, b) => b.step - a.step);
    const count =
      shown.length === alerts.length ? alerts.length : `${shown.length} of ${alerts.length}`;
    fill(
      this.node,
      element(
        "h2",
        {},
        "Alerts",
        element("span", { class: "count" }, alerts.length ? `${count}` : "none"),
      ),
      alerts.length
        ? this.#filters(kinds)
        : element("p", { class: "muted" }, "No alerts in this run so far."),
      element("ul", {}, ...shown.map((alert) => this.#item(alert))),
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
      dropDown(
        "Kind",
        [["", "all"], ...kinds.map((kind) => [kind, kindTitle(kind)])],
        this.kind,
        set("kind"),
      ),
      dropDown(
        "Severity",
        [
          ["", "all"],
          ["error", "errors"],
          ["warning", "warnings"],
          ["note", "notes"],
        ],
        this.severity,
        set("severity"),
      ),
    );
  }

  #item(alert) {
    return element(
      "li",
      {},
      element(
        "button",
        {
          class: `alert ${alert.severity}`,
          "aria-pressed": alert === this.chosen ? "true" : "false",
          onclick: () => this.onChoose(alert),
        },
        ...alertText(alert),
      ),
    );
  }
}

/** An alert in a few lines. */
export function alertText(alert) {
  const stage = { worse: " · worse", end: " · over" }[alert.stage] ?? "";
  return [
    element(
      "span",
      { class: "alert-head" },
      element("b", {}, `${kindTitle(alert.kind)}${stage}`),
      element("span", {}, `step ${formatStep(alert.step)}`),
    ),
    alert.run ? element("span", { class: "muted" }, alert.run) : null,
    alert.module_name ? element("span", { class: "alert-layer" }, alert.module_name) : null,
    element("span", { class: "alert-message" }, alert.message),
    alert.consequences?.length
      ? element("span", { class: "muted" }, `Follows from it: ${alert.consequences.join(", ")}`)
      : null,
  ].filter((part) => part !== null);
}

function kindTitle(kind) {
  const text = kind.replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}
