// One crosshair through all plots over steps, and the values at the pointer.

import { element } from "./dom.js";
import { xOf } from "./canvas.js";

/** A canvas over steps, with the crosshair's line above it. */
export function withHair(canvas) {
  return element("div", { class: "plot" }, canvas, element("i", { class: "hair", hidden: true }));
}

/** Moves the line in all of them to a step; null: nowhere. */
export function moveHairs(step) {
  for (const node of document.querySelectorAll(".plot")) {
    const [canvas, hair] = node.children;
    const { box, view } = canvas.plotted ?? {};
    const isIn = box && step !== null && step >= view.step0 && step <= view.step1;
    hair.hidden = !isIn || canvas.hidden;
    if (hair.hidden) continue;
    hair.style.left = `${canvas.offsetLeft + xOf(box, view, step)}px`;
    hair.style.top = `${canvas.offsetTop + box.y}px`;
    hair.style.height = `${box.height}px`;
  }
}

/**
 * Reports the values under the pointer in any of the canvases, and clicks. `plotted` of a canvas
 * has the place of its steps and a function that reads its values.
 * @param {HTMLElement} root
 * @param {(found: Object|null, event: PointerEvent) => void} onHover
 * @param {(found: Object, canvas: HTMLCanvasElement) => void} onClick
 */
export function watchPlots(root, onHover, onClick) {
  let wasOver = false;
  root.addEventListener("pointermove", (event) => {
    const found = plottedAt(event);
    if (found || wasOver) onHover(found, event);
    wasOver = found !== null;
  });
  root.addEventListener("click", (event) => {
    const found = plottedAt(event);
    if (found) onClick(found, event.target);
  });
}

function plottedAt({ target, clientX, clientY }) {
  const { box, view, read } = target.plotted ?? {};
  if (!box) return null;
  const bounds = target.getBoundingClientRect();
  const [x, y] = [clientX - bounds.left, clientY - bounds.top];
  const share = (x - box.x) / box.width;
  if (share < 0 || share > 1 || y < 0 || y > box.y + box.height) return null;
  const step = view ? Math.floor(view.step0 + share * (view.step1 - view.step0)) : null;
  const found = read(step, y, x);
  return Array.isArray(found) ? { step, lines: found } : found;
}
