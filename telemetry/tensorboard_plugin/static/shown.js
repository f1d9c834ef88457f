// The contents of the panels: size, scale and selection.

import { Slots } from "./chart.js";
import { COSTS_HEIGHT } from "./costs.js";
import { makeScale } from "./scale.js";
import { clampRows } from "./view.js";

const MIN_HEIGHT = 130; // of the picture
const ROW_HEIGHTS = [22, 38]; // where there is room: with curves below, and at most
const CURVES_HEIGHT = 190;
const AXES_HEIGHT = 42;
const AROUND_PICTURE = 300; // height of everything else that is seen at once, without costs
const LEGEND_HEIGHT = 18;

export class Shown {
  /** @param {import("./app.js").App} app */
  constructor(app) {
    this.app = app;
    this.panels = []; // pairs of a panel and its contents
    this.slots = new Slots(); // colors of layers
  }

  /** Computes the contents for a view. */
  settle(view) {
    const { statistic, theme, state, mode, panels } = this.app;
    const isZoomed = state.zoom !== null;
    const scale = this.scale();
    const rowCount = Math.max(...panels.map((panel) => this.app.rows(panel).length));
    const size = this.#size(rowCount, panels.length);
    this.panels = panels.map((panel) => {
      const rows = this.app.rows(panel);
      const field = panel.visibleField(statistic, view, isZoomed, rows);
      const compared = panels.find((known) => known !== panel);
      const values = panel.values(field, statistic, mode, compared);
      panel.title.hidden = panels.length === 1;
      const shown = {
        ...size,
        statistic,
        theme,
        view: clampRows(view, rows.length),
        isZoomed,
        rows,
        field,
        search: state.search,
        mode,
        grouping: panel.grouping(state.order),
        slots: this.slots,
        values,
        rowValues: panel.rowValues(field, values, rows, scale),
        scale,
        selection: this.#selection(panel),
        cursor: state.step,
        scalars: panels.map((known) => known.scalars),
        alerts: panel.alerts,
      };
      return [panel, shown];
    });
    const [[, first], [, second] = []] = this.panels;
    if (second) [first.compared, second.compared] = [second, first];
  }

  /** One scale for all runs; a zoom does not change it. */
  scale() {
    const { statistic, mode, panels } = this.app;
    const fields = panels.map((panel) => panel.field(statistic));
    const key = `${statistic.name} ${mode}`;
    const isKnown =
      this.known?.key === key && this.known.fields.every((field, i) => field === fields[i]);
    if (!isKnown || this.known.fields.length !== fields.length) {
      const values = fields.map((field, i) =>
        panels[i].values(field, statistic, mode, panels[1 - i]),
      );
      this.known = { key, fields, scale: makeScale(statistic, mode, values) };
    }
    return this.known.scale;
  }

  #size(rowCount, panelCount) {
    const { stage, panels } = this.app;
    const hasCosts = panels.some(({ scalars }) => scalars.some(({ kind }) => kind === "time"));
    const style = getComputedStyle(stage);
    const columns = panelCount > 1 && style.gridTemplateColumns.split(" ").length > 1 ? 2 : 1;
    const gap = parseFloat(style.columnGap) || 0;
    const width = Math.floor((stage.clientWidth - gap * (columns - 1)) / columns);
    const around = AROUND_PICTURE + (hasCosts ? COSTS_HEIGHT + LEGEND_HEIGHT : 0);
    const room = Math.max(window.innerHeight - around, 220);
    const [small, large] = ROW_HEIGHTS.map((row) => Math.min(rowCount * row + AXES_HEIGHT, room));
    const height = Math.max(Math.min(large, Math.max(small, room - CURVES_HEIGHT)), MIN_HEIGHT);
    return {
      width,
      height,
      gutter: Math.round(Math.min(Math.max(width * 0.24, Math.min(150, width * 0.36)), 250)),
      spare: room - height,
    };
  }

  #selection(panel) {
    const { layer, step } = this.app.state;
    if (layer === null) return null;
    const index = panel.overview.layers.findIndex((known) => known.name === layer);
    return index < 0 ? null : { layer: index, step: step ?? panel.overview.lastStep };
  }
}
