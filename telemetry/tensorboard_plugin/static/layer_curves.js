// The chosen statistic of the rows in view over time: one curve each, colored by depth.

import { drawChart, legendOf } from "./chart.js";
import { cssColor } from "./palette.js";

const MOST = 12;
const SEVERITIES = ["error", "warning", "note"];
const LEAST_HEIGHT = 150;
const MOST_HEIGHT = 420;

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Object} shown what the panel shows, with its `alerts`
 * @param {number} right room at the right
 * @returns {Element} the legend
 */
export function drawLayerCurves(canvas, shown, right) {
  const { rows, view, theme, width, gutter, selection, statistic, mode, spare } = shown;
  const chosen = rows.findIndex((row) => selection && row.layers.includes(selection.layer));
  const [first, end] = [Math.floor(view.row0), Math.min(Math.ceil(view.row1), rows.length)];
  const places = placesOf(first, end, faultyRows(shown, first, end), chosen);
  const curves = places.map((place) => ({
    ...curveOf(shown, place),
    color: place === chosen ? theme.accent : depthColor(theme, rows.length, place),
    width: place === chosen ? 2.5 : 1, // thicker ones take ten times as long
    label: rows[place].label,
  }));
  drawChart(canvas, {
    curves,
    view,
    theme,
    width,
    height: Math.min(Math.max(spare - 40, LEAST_HEIGHT), MOST_HEIGHT),
    left: gutter,
    right,
    log: statistic.log || (mode !== "value" && statistic.log),
    cursor: shown.cursor,
    axis: true,
  });
  return legendOf(curves);
}

/** Rows in view with an alert, the gravest first. */
function faultyRows({ rows, alerts }, first, end) {
  const layers = new Set();
  for (const severity of SEVERITIES) {
    for (const alert of alerts) if (alert.severity === severity) layers.add(alert.layer);
  }
  const rowOfLayer = new Map();
  for (let row = first; row < end; row++) {
    for (const layer of rows[row].layers) rowOfLayer.set(layer, row);
  }
  const found = [...layers].map((layer) => rowOfLayer.get(layer));
  return [...new Set(found)].filter((row) => row !== undefined);
}

/** At most so many rows: those with alerts, others evenly spread; the chosen one is last, on top. */
function placesOf(first, end, faulty, chosen) {
  const wanted = faulty.slice(0, MOST);
  const count = end - first > MOST ? MOST - wanted.length : end - first;
  const others = Array.from({ length: count }, (_, i) =>
    count < 2 ? first : first + Math.round((i * (end - first - 1)) / (count - 1)),
  );
  const places = [...new Set([...wanted, ...others])].sort((a, b) => a - b);
  if (chosen < 0) return places;
  return [...places.filter((place) => place !== chosen), chosen];
}

function curveOf({ field, rows, rowValues }, place) {
  const [steps, values] = [[], []];
  field.steps.forEach((step, column) => {
    const value = rowValues[column * rows.length + place];
    if (value < 0) return;
    steps.push(step);
    values.push(value);
  });
  return { steps, values };
}

/** From the scale of the picture, without the end that fades into the background. */
function depthColor({ isDark }, count, place) {
  const share = count > 1 ? place / (count - 1) : 0;
  return cssColor(false, isDark ? 0.3 + 0.7 * share : 0.85 * share);
}
