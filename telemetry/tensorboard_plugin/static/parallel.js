// Parallel coordinates: hyperparameters and losses of runs, a line for each run.

import { isLog } from "./chart.js";
import { clamp, formatNumber } from "./format.js";
import { html, useRef, useState } from "./preact.js";
import { cssColor, NAN_COLORS } from "./scale.js";

const HEIGHT = 134; // of the axes
const MOST_NAMES = 8;

/**
 * An axis for each column, the last of which gives the lines their colors.
 * @param {Object} props `accepts(run)`: whether a run matches the filter; the lines of others are faint;
 *   `onBrush(title, low, high)`: a range was chosen, as values; undefined ends are open
 */
export function Parallel({ runs, columns, accepts, onBrush, theme }) {
  const from = useRef(null); // where a drag began
  const [dragged, setDragged] = useState(null); // the axis, and the range that is being chosen on it
  const axes = columns.map(({ title, key: valueOf }) => ({ title, valueOf, ...axisOf(runs.map(valueOf)) }));
  const placeAt = ({ clientY, currentTarget }) => clamp(1 - (clientY - currentTarget.getBoundingClientRect().top) / HEIGHT, 0, 1);
  const brushOf = ({ title, valueAt }) => ({
    onpointerdown(event) {
      event.currentTarget.setPointerCapture(event.pointerId);
      from.current = placeAt(event);
    },
    onpointermove(event) {
      if (from.current === null || Math.abs(placeAt(event) - from.current) < 0.02) return;
      setDragged({ title, range: [from.current, placeAt(event)].sort((a, b) => a - b) });
    },
    onpointerup() {
      const [low, high] = dragged?.range ?? [0, 1];
      onBrush(title, low > 0 ? valueAt(low) : undefined, high < 1 ? valueAt(high) : undefined);
      from.current = null;
      setDragged(null);
    },
  });
  const sorted = [...runs].sort((a, b) => accepts(a) - accepts(b)); // the others lie below
  return html`<details class="below-runs parallel">
    <summary>Hyperparameters and results of these runs</summary>
    <div class="parallel-scroll">
      <div class="axes" role="img" aria-label="${axes.map((axis) => axis.title).join(", ")} of ${runs.length} runs">
        <svg viewBox="0 0 ${axes.length - 1} 1" preserveAspectRatio="none" fill="none" stroke-width="1.5"
          style=${{ left: `${50 / axes.length}%`, width: `${100 - 100 / axes.length}%` }}>
          ${sorted.map((run) => html`<${Line} ...${{ run, axes, theme }} opacity=${accepts(run) ? 0.9 : 0.12} />`)}
        </svg>
        ${axes.map((axis) => html`<${Axis} key=${axis.title} ...${axis} brush=${brushOf(axis)}
          range=${dragged?.title === axis.title && dragged.range} />`)}
      </div>
    </div>
    <p class="muted">Drag along an axis to filter, click to clear: the filter above has the range. Dotted: the run has no
      value on the axis in between.</p>
  </details>`;
}

function Axis({ title, ticks, range, brush }) {
  const percent = (place) => `${100 * place}%`;
  return html`<div class="axis">
    <b title=${title}>${title}</b>
    <div ...${brush}>
      ${range && html`<i style=${{ bottom: percent(range[0]), top: percent(1 - range[1]) }} />`}
      ${ticks.map(({ place, text }) => html`<span title=${text}
        style=${{ bottom: percent(place), transform: `translate(-50%, ${percent(1 - place)})` }}>${text}</span>`)}
    </div>
  </div>`;
}

/** The line of a run; dotted past the axes on which it has no value, with a square at the last one. */
function Line({ run, axes, theme, ...attributes }) {
  const places = axes.map(({ valueOf, placeOf }) => placeOf(valueOf(run)));
  const known = [...places.keys()].filter((i) => places[i] !== null);
  const color = places.at(-1) === null ? NAN_COLORS[0] : cssColor(false, places.at(-1));
  const point = (i) => `${i} ${1 - places[i]}`;
  const segments = known.slice(1).map((to, n) => [known[n], to]);
  const path = (some) => some.map(([from, to]) => `M${point(from)}L${point(to)}`).join("");
  const end = run.alert && !run.alert.resolved ? theme[run.alert.severity] : color;
  return html`<g ...${attributes} stroke=${color}>
    <path d=${path(segments.filter(([from, to]) => to === from + 1))} />
    <path d=${path(segments.filter(([from, to]) => to > from + 1))} stroke-dasharray="2 4" />
    <path d=${known.map((i) => `M${point(i)}h0`).join("")} class="points" stroke-width="4" />
    ${known.length > 0 && html`<path d="M${point(known.at(-1))}h0" stroke=${end} stroke-width="6" />`}
  </g>`;
}

/** Places of values on an axis, 0 to 1, or null; the labels of its ends or names, and the value at any place. */
function axisOf(values) {
  const known = values.filter((value) => value != null);
  if (!known.every((value) => typeof value === "number")) {
    const names = [...new Set(known.map(String))].sort();
    const place = (name) => (names.length > 1 ? names.indexOf(name) / (names.length - 1) : 0.5);
    const few = names.length > MOST_NAMES ? [names[0], names.at(-1)] : names;
    const ticks = few.map((text) => ({ place: place(text), text }));
    const valueAt = (at) => names[Math.round(at * (names.length - 1))];
    return { placeOf: (value) => (value == null ? null : place(String(value))), ticks, valueAt };
  }
  const finite = known.filter(Number.isFinite);
  const [least, most] = [Math.min(...finite), Math.max(...finite)];
  const [scaled, unscaled] = least > 0 && isLog([{ values: finite }]) ? [Math.log, Math.exp] : [Number, Number];
  const span = scaled(most) - scaled(least);
  const placeOf = (value) => {
    if (!Number.isFinite(value)) return null;
    return span > 0 ? (scaled(value) - scaled(least)) / span : 0.5;
  };
  const ends = span > 0 ? [least, most] : finite.slice(0, 1);
  const ticks = ends.map((end) => ({ place: placeOf(end), text: formatNumber(end) }));
  const valueAt = (place) => formatNumber(unscaled(scaled(least) + place * span));
  return { placeOf, ticks, valueAt };
}
