// Curves over steps: loss and learning rates, time and memory, and some layers below the picture.

import { drawChart, readCurve, styleOf } from "./chart.js";
import { aligned, curveAt } from "./field.js";
import { formatNumber } from "./format.js";
import { rowsByLayer } from "./rows.js";
import { scaleText, usualOf } from "./scale.js";

const STRIP_HEIGHT = 72;

/**
 * Loss and learning rates of a run, and in a ratio of two runs the loss of the other.
 * @returns {{loss: Object[], rates: Object[], legend: Object[]}|null} null without any
 */
export function stripOf({ panel, theme, mode, losses, cursor }) {
  const { scalars, overview } = panel;
  const own = scalars.filter(({ kind }) => kind === "loss" || kind === "learning rate");
  const others = mode === "run" ? losses.filter((curve) => !own.includes(curve)) : [];
  const known = [...own, ...others].map((curve, i) => ({
    ...(curve.kind === "loss" ? curve : heldUntil(curve, overview.lastStep)),
    color: theme.curves[i % theme.curves.length],
    label: others.includes(curve) ? `${curve.tag} of the other run` : curve.tag,
    isStepped: curve.kind !== "loss",
  }));
  if (!known.length) return null;
  return {
    loss: known.filter(({ kind }) => kind === "loss"),
    rates: known.filter(({ kind }) => kind !== "loss"),
    legend: known.map((curve) => withValue(curve, cursor)),
  };
}

export function drawStrip(canvas, { loss, rates }, { view, theme, width, gutter, right, cursor, losses }) {
  const first = loss.length ? loss : rates;
  const fit = loss.length ? losses : [];
  return drawChart(canvas, {
    view, theme, width, right, cursor, fit,
    height: STRIP_HEIGHT,
    left: gutter,
    curves: first,
    log: isLog([...first, ...fit]),
    second: loss.length ? rates : [],
  });
}

/** A curve that is written where it changes, up to the last step. */
function heldUntil(curve, lastStep) {
  const { length } = curve.steps;
  if (!length || curve.steps[length - 1] >= lastStep) return curve;
  const values = [...curve.values, curve.values[length - 1]];
  return { ...curve, steps: [...curve.steps, lastStep], values };
}

/** A curve whose label has its value at a step, or its last value. */
function withValue(curve, step) {
  const { text } = readCurve(curve, step ?? Infinity, formatNumber);
  return { ...curve, label: `${curve.label} ${text}` };
}

/** Whether values span so much that a linear axis would hide most of them. */
export function isLog(curves) {
  let [low, high] = [Infinity, 0];
  for (const { values } of curves) {
    for (const value of values) {
      if (!(value > 0) || value === Infinity) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  return high > 50 * low;
}

// --- costs: the share of each phase in the time of a step, stacked, and memory

const COSTS_HEIGHT = 58;
const GIB = 2 ** 30;
const percent = (share) => `${Math.round(100 * share)} %`;

/** @returns {{shares: Object[], memory: Object[], legend: Object[], title: string, line: string}|null} null without times */
export function costsOf({ panel: { scalars }, theme, cursor }) {
  const phases = scalars.filter(({ kind }) => kind === "time");
  if (!phases.length) return null;
  const used = scalars.filter(({ kind }) => kind === "memory");
  const named = [...phases, ...used].map((curve, i) => ({ ...curve, ...styleOf(theme, i), label: nameOf(curve) }));
  const shares = stack(named.slice(0, phases.length));
  const memory = named.slice(phases.length).map((curve) => ({ ...curve, values: curve.values.map((bytes) => bytes / GIB) }));
  const now = readCosts({ shares, memory }, cursor ?? Infinity);
  const legend = now.map((curve) => ({ ...curve, label: `${curve.label} ${curve.text}` }));
  const title = memory.length ? "Time, memory (GiB)" : "Time";
  return { shares, memory, legend, title, line: `${title}: ${legend.map(({ label }) => label).join(" · ")}` };
}

function readCosts({ shares, memory }, step) {
  const time = (curve) => (_, i) => `${formatNumber(1000 * curve.seconds[i])} ms (${percent(curve.shares[i])})`;
  return [
    ...shares.map((curve) => readCurve(curve, step, time(curve))),
    ...memory.map((curve) => readCurve(curve, step, (value) => `${formatNumber(value)} GiB`)),
  ];
}

export function drawCosts(canvas, costs, { view, theme, width, gutter, right, cursor }) {
  const plot = drawChart(canvas, {
    view, theme, width, right, cursor,
    height: COSTS_HEIGHT,
    left: gutter,
    curves: costs.shares,
    range: [0, 1],
    format: percent,
    second: costs.memory,
    secondUsual: [0],
  });
  return { ...plot, read: (step) => readCosts(costs, step) };
}

/** Curves of which each begins where the one below it ends, at the steps that all have. */
function stack(phases) {
  const { steps, at } = aligned(phases);
  const total = at.map((seconds) => seconds.reduce((sum, spent) => sum + spent, 0));
  let low = steps.map(() => 0);
  return phases.map((phase, number) => {
    const seconds = at.map((of) => of[number]);
    const shares = seconds.map((spent, i) => (total[i] > 0 ? spent / total[i] : 0));
    const values = low.map((share, i) => share + shares[i]);
    const band = [low, values];
    low = values;
    return { ...phase, steps, values, band, seconds, shares, dash: [] };
  });
}

/** `time/data_wait_s` as "data wait". */
function nameOf({ tag }) {
  return tag.replace(/^.*\/|_(s|bytes)$/g, "").replaceAll("_", " ");
}

// --- layers

const MOST = 12;
const SEVERITIES = ["error", "warning", "note"];
const LEAST_HEIGHT = 150;
const MOST_HEIGHT = 420;

/** Curves of the rows in view that have alerts, the gravest first, and on top that of the selected layer. */
export function curvesOfLayers({ rows, view, theme, selection, alerts, field, rowValues }) {
  const rowOf = rowsByLayer(rows);
  const [first, end] = [Math.floor(view.row0), Math.min(Math.ceil(view.row1), rows.length)];
  const chosen = rowOf.get(selection?.layer) ?? -1;
  const ordered = SEVERITIES.flatMap((severity) => alerts.filter((alert) => alert.severity === severity));
  const faulty = new Set(ordered.map(({ layer }) => rowOf.get(layer)));
  const places = [...faulty].filter((row) => row >= first && row < end && row !== chosen).slice(0, MOST);
  places.sort((a, b) => a - b);
  if (chosen >= 0) places.push(chosen);
  return places.map((place, i) => ({
    ...curveAt(field.steps, rowValues, rows.length, place),
    ...styleOf(theme, i),
    width: place === chosen ? 3 : 1, // thicker ones take ten times as long
    label: rows[place].label,
    layer: rows[place].layers[0],
  }));
}

/** @param {string|null} hovered label of a curve that is thick */
export function drawLayerCurves(canvas, shown, hovered) {
  const { curves, view, theme, width, gutter, right, spare, scale, statistic, cursor, compared } = shown;
  return drawChart(canvas, {
    view, theme, width, right, cursor,
    height: Math.min(Math.max(spare - 40, LEAST_HEIGHT), MOST_HEIGHT),
    left: gutter,
    curves: curves.map((curve) => (curve.label === hovered ? { ...curve, width: 3 } : curve)),
    fit: compared?.curves ?? [],
    ...axisOf(statistic, scale),
    axis: true,
  });
}

/** How a chart's axis shows the values that a scale shows in colors. */
export function axisOf(statistic, scale) {
  return {
    log: scale.log,
    range: scale.log ? undefined : [scale.low, scale.high],
    format: (value) => scaleText(scale, value),
    usual: usualOf(statistic, scale),
  };
}
