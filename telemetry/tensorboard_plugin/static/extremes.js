// Layers in which a statistic is far from that of the layers with the same role.

import { layersOf } from "./alert_list.js";
import { element, fill, layerName } from "./dom.js";
import { columnAt, valueAt } from "./field.js";
import { formatNumber, formatStep, formatValue } from "./format.js";
import { roleOf, titleOf } from "./rows.js";

const FAR = 10; // times the reference
const FEWEST = 3; // layers that have a median worth comparing with
const MOST = 6;
const MUCH = 0.5; // of a share

export class Extremes {
  /** @param {(layer: string, step: number) => void} onChoose */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.node = element("section", { class: "extremes", "aria-label": "Far from the other layers" });
  }

  /** Shows the layers of a run that are far from the others at a step; causes only of those that an alert names. */
  show(panel, statistic, step) {
    const field = panel.field(statistic);
    const column = field ? columnAt(field.steps, step) : -1;
    const key = [statistic.name, column];
    const { alerts } = panel;
    if (field === this.field && alerts === this.alerts && key.every((part, i) => part === this.key[i])) return;
    Object.assign(this, { field, key, alerts });
    const found = panel.overview.layers.flatMap((layer, index) => {
      const value = column < 0 ? -1 : valueAt(field, index, step);
      return value >= 0 ? [{ layer, value }] : [];
    });
    const { items, title, text } = judge(statistic, found);
    const small = items.filter(({ isLarge }) => !isLarge).sort((a, b) => a.ratio - b.ratio);
    const large = items.filter(({ isLarge }) => isLarge).sort((a, b) => b.ratio - a.ratio);
    this.node.hidden = !items.length;
    if (this.node.hidden) return fill(this.node);
    const accused = new Set(alerts.flatMap(layersOf));
    const isAccused = ({ layer }) => accused.has(layer.name);
    const list = (side, causes, of) => this.#list(side, of.some(isAccused) ? causes : "", of, statistic, step);
    fill(
      this.node,
      element("h2", {}, title, element("span", { class: "count" }, `at step ${formatStep(field.steps[column])}`)),
      element("p", { class: "muted" }, `${statistic.title}: ${text}`, items.some(isAccused) ? "" : " No alert names them."),
      list("Below", statistic.too_little, small),
      list("Above", statistic.too_much, large),
    );
  }

  #list(side, causes, found, statistic, step) {
    if (!found.length) return null;
    const item = ({ layer, value, relation }) =>
      layerItem(titleOf(layer), formatValue(statistic, value) + relation, () => this.onChoose(layer.name, step));
    return element(
      "div",
      {},
      element("h3", {}, `${side}: ${found.length}`),
      causes ? element("p", { class: "muted" }, `Possible causes: ${causes}.`) : null,
      element("ol", {}, ...found.slice(0, MOST).map(item)),
      found.length > MOST ? element("p", { class: "muted" }, `and ${found.length - MOST} more`) : null,
    );
  }
}

/** An entry of a list: a layer and a text; a click chooses the layer. */
export function layerItem(title, text, onclick) {
  const figure = element("span", { class: "number" }, text);
  return element("li", {}, element("button", { onclick }, layerName(title), figure));
}

/** The layers that are far from their reference, and how they were chosen. */
function judge({ unit, log, usual }, found) {
  if (unit === "share") {
    const items = found.filter(({ value }) => value > MUCH);
    return {
      items: items.map((item) => ({ ...item, ratio: item.value, isLarge: true, relation: "" })),
      title: `Above ${100 * MUCH} %`,
      text: `layers above ${100 * MUCH} %.`,
    };
  }
  if (!log) return { items: [], text: "" };
  const references = usual == null ? mediansOfPeers(found) : new Map(found.map(({ layer }) => [layer, usual]));
  const items = found.flatMap((item) => {
    const ratio = item.value / references.get(item.layer); // NaN without a reference
    const isLarge = ratio > FAR;
    if (!isLarge && !(ratio < 1 / FAR)) return [];
    const factor = formatNumber(isLarge ? ratio : 1 / ratio);
    return [{ ...item, ratio, isLarge, relation: ratio > 0 ? ` (${factor}x ${isLarge ? "above" : "below"})` : "" }];
  });
  const what = usual == null ? "the median of layers with the same role" : `the usual ${formatNumber(usual)}`;
  const title = usual == null ? "Far from the other layers" : "Far from the usual";
  return { items, title, text: `layers more than ${FAR}x from ${what}.` };
}

/** The median of each layer's role, else of its class, else of all layers without such a group. */
function mediansOfPeers(found) {
  const medians = new Map();
  const lacks = ({ layer }) => !medians.has(layer);
  const assign = (groups) => {
    for (const members of groups.values()) {
      const known = members.map(({ value }) => value).filter((v) => v > 0 && v < Infinity).sort((a, b) => a - b);
      if (known.length < FEWEST) continue;
      for (const { layer } of members.filter(lacks)) medians.set(layer, known[known.length >> 1]);
    }
  };
  assign(Map.groupBy(found, ({ layer }) => roleOf(layer)));
  assign(Map.groupBy(found, ({ layer }) => layer.type));
  assign(Map.groupBy(found.filter(lacks), () => ""));
  return medians;
}
