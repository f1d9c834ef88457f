// Pieces that several parts of the page use: plots with a crosshair, the tooltip, lists, dialogs.

import { isInside, stepAt, xOf } from "./canvas.js";
import { drawChart, sampleOf } from "./chart.js";
import { formatStep } from "./format.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./preact.js";

let pointed = null;
const followers = new Set();

/**
 * Says what is under the pointer: null; or where the crosshair is, `step` and the `layer`'s name; the name
 * of a `run`; and what the tooltip says, at `x`, `y` in the window: `title`, or the step, with `lines` and
 * other `parts`.
 */
export function point(at) {
  pointed = at;
  for (const follow of followers) follow(at);
}

/** Within a component: that, or the part of it that a function selects; when it changes, the component is drawn again. */
export function usePointed(select = (at) => at) {
  const [selected, setSelected] = useState(() => select(pointed));
  useLayoutEffect(() => {
    const follow = (at) => setSelected(select(at));
    followers.add(follow);
    return () => followers.delete(follow);
  });
  return selected;
}

addEventListener("scroll", () => point(null), { capture: true, passive: true }); // the pointer stays behind

/** Moves a line of the crosshair to a place in pixels; hides it without one. */
function moveHair(hair, place) {
  hair.hidden = !place;
  for (const [side, pixels] of Object.entries(place || {})) hair.style[side] = `${pixels}px`;
}

/**
 * Within a component: the answer to its latest question; null while it is awaited, `{error}` if asking failed.
 * A new `version` of the data is asked for behind the old answer; questions that may change at once have a
 * `delay` in ms.
 */
export function useAnswer(key, version, ask, delay = 0) {
  const [known, setKnown] = useState({});
  useEffect(() => {
    let isLate = false;
    const timer = setTimeout(async () => {
      const answer = await ask().catch((error) => ({ error }));
      if (!isLate) setKnown({ key, answer });
    }, delay);
    return () => {
      isLate = true;
      clearTimeout(timer);
    };
  }, [key, version]);
  return known.key === key ? known.answer : null;
}

/**
 * A canvas with the crosshair above it.
 * @param {Object} props attributes of the canvas, and
 *   `draw(canvas, width)`: draws, and returns the `box` of the plot in CSS pixels, the `view` of its
 *   steps if it is over steps, `read(step, y, x)`: what is at a place, for `point`, and the `cursor` there;
 *   `yOf(layer)`: the height of a layer's row; `isWide`: whether it reads beside the box, too;
 *   `width`: that of its place;
 *   `onPick(found)`: called upon a click, with what is there
 */
export function Plot({ draw, onPick, ...attributes }) {
  const [place, canvas, stepHair, rowHair] = [useRef(), useRef(), useRef(), useRef()];
  const [plot, pointer] = [useRef(null), useRef(null)];
  const at = usePointed();
  const found = ({ offsetX: x, offsetY: y }) => {
    const { box, view, read, isWide } = plot.current ?? {};
    if (!read || !(isWide || isInside({ ...box, y: 0, height: box.y + box.height }, x, y))) return null;
    return read(view ? Math.floor(stepAt(box, view, x)) : null, y, x);
  };
  const onpointermove = (event) => {
    pointer.current = event;
    const said = found(event);
    canvas.current.style.cursor = said?.cursor ?? "";
    point(said && { ...said, x: event.clientX, y: event.clientY });
  };
  const onpointerleave = () => point(null);
  const onclick = (event) => {
    const picked = found(event);
    if (picked) onPick?.(picked);
  };
  useLayoutEffect(() => {
    plot.current = draw(canvas.current, place.current.clientWidth) ?? null;
    canvas.current.dataset.plot = plot.current ? Object.values(plot.current.box).join(",") : "";
    if (pointer.current) onpointermove(pointer.current); // it is over something else now
  }, [draw]);
  useLayoutEffect(() => {
    if (!at) pointer.current = null; // such as after scrolling
    const { box, view, yOf } = plot.current ?? {};
    const step = at?.step ?? -1;
    const isIn = view && step >= view.step0 && step <= view.step1;
    moveHair(stepHair.current, isIn && { left: xOf(box, view, step), top: box.y, height: box.height });
    const top = yOf?.(at?.layer) ?? null;
    moveHair(rowHair.current, top !== null && { left: box.x, top, width: box.width });
  });
  return html`<div class="plot" ref=${place}>
    <canvas ref=${canvas} ...${{ role: "img", ...attributes, onpointermove, onpointerleave, onclick }} />
    <i class="hair" ref=${stepHair} /><i class="hair row" ref=${rowHair} />
  </div>`;
}

/**
 * Curves over steps, and their legend; the one that is under the pointer somewhere is thick.
 * @param {Object} props options of `drawChart`; `labelAt(at)`: the label of the curve of what is under the pointer
 */
export function Curves({ title, class: style, labelAt = () => null, onPick, hasLegend = true, ...options }) {
  const label = usePointed((at) => at && labelAt(at));
  const curves = options.curves.map((curve) => (curve.label === label ? { ...curve, width: 3 } : curve));
  const draw = (canvas, width) => drawChart(canvas, { width, ...options, curves });
  return html`<${Plot} class=${style} draw=${draw} aria-label=${title} onPick=${onPick} />
    ${hasLegend && html`<${CurveLegend} curves=${curves} />`}`;
}

/** Next to the pointer, toward the middle of the window. A popover: it is above dialogs, too. */
export function Tooltip() {
  const node = useRef();
  const at = usePointed();
  const said = at?.x === undefined ? null : at;
  useLayoutEffect(() => {
    node.current.togglePopover(false); // a dialog may have opened since
    node.current.togglePopover(Boolean(said));
  }, [said]);
  const beside = (at, length, before, behind) => (at > length / 2 ? { [before]: length - at + 14 } : { [behind]: at + 14 });
  const place = said && { ...beside(said.x, innerWidth, "right", "left"), ...beside(said.y, innerHeight, "bottom", "top") };
  const line = (curve) => html`<tr class=${curve.isNearest ? "nearest" : ""}>
    <td><${Sample} ...${curve} /></td><td>${curve.label}</td><td>${curve.text}</td>
  </tr>`;
  return html`<div class="tooltip" role="tooltip" popover="manual" style=${place} ref=${node}>
    ${said && html`<b>${said.title ?? `step ${formatStep(said.step)}`}</b>`}
    ${said?.parts}
    ${said?.lines && html`<table><tbody>${said.lines.map(line)}</tbody></table>`}
  </div>`;
}

function Sample({ color, dash }) {
  return color ? html`<i class="sample" style=${{ background: sampleOf(color, dash), color }} />` : null;
}

/** The color and name of each curve. */
export function CurveLegend({ curves }) {
  return html`<div class="curve-legend">
    ${curves.map((curve) => html`<span><${Sample} ...${curve} />${curve.label}</span>`)}
  </div>`;
}

export function DropDown({ label, options, value, onChoose, ...attributes }) {
  return html`<label class="field" ...${attributes}>
    <span>${label}</span>
    <select data-key=${label} value=${value} onchange=${({ target }) => onChoose(target.value)}>
      ${options.map(([key, text]) => html`<option value=${key} selected=${key === value}>${text}</option>`)}
    </select>
  </label>`;
}

/** A modal dialog for as long as it is drawn; closing it calls `onClose`. */
export function Dialog({ onClose, children, ...attributes }) {
  const node = useRef();
  useLayoutEffect(() => {
    const before = document.activeElement;
    node.current.showModal();
    return () => before?.focus?.(); // closing a dialog would do so, removing it does not
  }, []);
  return html`<dialog ref=${node} onclose=${onClose} ...${attributes}>${children}</dialog>`;
}
