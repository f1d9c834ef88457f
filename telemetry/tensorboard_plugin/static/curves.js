// Curves of a run above and below its picture: loss and learning rates, time and memory, some layers.

import { clamp } from "./canvas.js";
import { axisOf, drawChart, isLog, readCurve, styleOf } from "./chart.js";
import { aligned, curveAt } from "./field.js";
import { formatNumber } from "./format.js";
import { rowsByLayer } from "./rows.js";

const STRIP_HEIGHT = 72;

/**
 * Loss and learning rates of a run, and in a ratio of two runs the loss of the other.
 * @returns {{loss: Object[], rates: Object[], legend: Object[]}|null} null without any
 */
export function stripOf({ panel: { scalars, overview }, theme, mode, losses, cursor }) {
  const own = scalars.filter(({ kind }) => kind === "loss" || kind === "learning rate");
  const others = mode === "run" ? losses.filter((curve) => !own.includes(curve)) : [];
  const known = [...own, ...others].map((curve, i) => ({
    ...(curve.kind === "loss" ? curve : heldUntil(curve, overview.lastStep)),
    color: theme.curves[i % theme.curves.length],
    label: others.includes(curve) ? `${curve.tag} of the other run` : curve.tag,
    isStepped: curve.kind !== "loss",
  }));
  if (!known.length) return null;
  const [loss, rates] = [true, false].map((isLoss) => known.filter(({ kind }) => (kind === "loss") === isLoss));
  return { loss, rates, legend: withValues(known.map((curve) => readCurve(curve, cursor ?? Infinity, formatNumber))) };
}

export function drawStrip(canvas, { loss, rates }, shown) {
  const [curves, second] = loss.length ? [loss, rates] : [rates, []];
  const fit = loss.length ? shown.losses : [];
  return drawChart(canvas, { ...frameOf(shown), height: STRIP_HEIGHT, curves, second, fit, log: isLog([...curves, ...fit]) });
}

/** Options of a chart that is level with the picture. */
function frameOf({ view, theme, width, right, gutter: left, cursor, resumed }) {
  return { view, theme, width, right, left, cursor, resumed };
}

/** A curve that is written where it changes, up to the last step. */
function heldUntil(curve, lastStep) {
  const [step, value] = [curve.steps.at(-1), curve.values.at(-1)];
  if (!(step < lastStep)) return curve;
  return { ...curve, steps: [...curve.steps, lastStep], values: [...curve.values, value] };
}

/** The same curves, whose labels have their values. */
function withValues(curves) {
  return curves.map((curve) => ({ ...curve, label: `${curve.label} ${curve.text}` }));
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
  const legend = withValues(readCosts({ shares, memory }, cursor ?? Infinity));
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

export function drawCosts(canvas, costs, shown) {
  const { shares: curves, memory: second } = costs;
  const axes = { range: [0, 1], format: percent, secondUsual: [0] };
  const plot = drawChart(canvas, { ...frameOf(shown), height: COSTS_HEIGHT, curves, second, ...axes });
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
const HEIGHTS = [150, 420];

/** Curves of the rows in view that have alerts, the gravest first, and on top that of the selected layer. */
export function curvesOfLayers({ panel, rows, view, theme, selection, alerts, field, rowValues }) {
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
    layer: panel.overview.layers[rows[place].layers[0]].name,
  }));
}

/** @param {string|null} hovered layer of a curve that is thick */
export function drawLayerCurves(canvas, shown, hovered) {
  const { curves, spare, scale, statistic, compared } = shown;
  return drawChart(canvas, {
    ...frameOf(shown),
    height: clamp(spare - 40, ...HEIGHTS),
    curves: curves.map((curve) => (curve.layer === hovered ? { ...curve, width: 3 } : curve)),
    fit: compared?.curves ?? [],
    ...axisOf(statistic, scale),
    hasSteps: true,
  });
}
