// What is beside the picture: a chosen alert, who moved first, a layer in detail, all alerts.

import { AlertList, alertText } from "./alert_list.js";
import { Detail } from "./detail.js";
import { element, fill } from "./dom.js";
import { Movers } from "./movers.js";

export class Side {
  /** @param {import("./app.js").App} app */
  constructor(app) {
    this.app = app;
    const { actions } = app;
    this.chosen = element("section", { class: "chosen-alert", "aria-label": "Chosen alert" });
    this.movers = new Movers((layer, step) => actions.select(layer, step));
    this.detail = new Detail({
      close: () => actions.close(),
      move: (count) => actions.moveStep(count),
      statistic: (statistic) => app.change({ statistic }),
      movers: app.source.movers ? () => app.actions.showMovers() : null,
    });
    this.alertList = new AlertList((alert) => actions.chooseAlert(alert));
    this.node = element(
      "aside",
      { class: "side", "aria-label": "Details and alerts" },
      element("button", { class: "drawer-close", onclick: () => actions.close() }, "Close"),
      this.chosen,
      this.movers.node,
      this.detail.node,
      this.alertList.node,
    );
  }

  /** To what is said of a chosen alert, and the picture beside it. */
  scrollToTop() {
    this.node.scrollTop = 0; // of the drawer
    window.scrollTo({ top: 0 });
  }

  draw() {
    const { app } = this;
    this.node.classList.toggle("open", app.isSideOpen);
    const alert = app.chosenAlert;
    const isOneOfTwo = app.panels.length > 1;
    const panel = app.detailPanel();
    const focused = panel ?? app.focusedPanel();
    const run = isOneOfTwo ? focused.run : null;
    fill(
      this.chosen,
      alert ? element("div", { class: `alert ${alert.severity}` }, ...alertText(alert, run)) : null,
    );
    this.movers.show(focused.run, focused.overview.layers);
    this.alertList.show(app.panels, alert);
    const layer = panel?.overview.layers.find((known) => known.name === app.state.layer);
    if (!layer) return this.detail.clear();
    this.detail.show({
      run: panel.run,
      isOneOfTwo,
      layer,
      step: app.state.step,
      statistic: app.statistic,
      statistics: panel.overview.statistics,
      view: app.view(),
      alerts: panel.alerts.filter(
        (known) => known.module_name === layer.name && known !== alert,
      ),
      theme: app.theme,
    });
  }
}
