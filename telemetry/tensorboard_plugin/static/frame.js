// The parts of the page that are always there.

import { element, fill } from "./dom.js";
import { KEY_HELP } from "./keyboard.js";

/**
 * Puts them into the page.
 * @param {HTMLElement} root
 * @param {Object} made elsewhere: `tooltip`, `announcer`, `side`, `runTable`
 * @returns {Object} the elements that the page fills, by name
 */
export function buildFrame(root, { tooltip, announcer, side, runTable }) {
  const toolbar = element("header", { class: "toolbar" });
  const stage = element("div", { class: "stage" });
  const legend = element("div", { class: "legend" });
  const heading = element("h1", { class: "unseen" }, "Telemetry");
  const messageArea = element("div", { class: "message-area" });
  const missing = element("p", { class: "missing-run", role: "status", hidden: true });
  const picture = element(
    "div",
    { class: "picture" },
    legend,
    stage,
    element("p", { class: "muted keys" }, KEY_HELP),
  );
  const main = element(
    "main",
    { class: "center" },
    heading,
    messageArea,
    missing,
    picture,
    tooltip.node,
    announcer.node,
  );
  fill(root, toolbar, element("div", { class: "body" }, main, side.node), runTable.node);
  return { toolbar, stage, legend, heading, messageArea, missing, picture };
}
