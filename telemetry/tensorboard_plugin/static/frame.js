// The parts of the page that are always there, and messages in place of the picture.

import { element, fill } from "./dom.js";
import { KEY_HELP } from "./input.js";

/**
 * Puts them into the page.
 * @param {HTMLElement} root
 * @param {Object} made elsewhere: `tooltip`, `announcer`, `side`, `runTable`, `large`
 * @returns {Object} the elements that the page fills, by name
 */
export function buildFrame(root, { tooltip, announcer, side, runTable, large, actions }) {
  const toolbar = element("header", { class: "toolbar" });
  const stage = element("div", { class: "stage" });
  const legend = element("div", { class: "legend" });
  const heading = element("h1", { class: "unseen" }, "Telemetry");
  const messageArea = element("div", { class: "message-area" });
  const missing = element("p", { class: "missing-run", role: "status", hidden: true });
  const sweep = element("button", { class: "sweep", hidden: true, onclick: () => actions.chooseRun("run", "alerts>0") });
  const picture = element(
    "div",
    { class: "picture" },
    sweep,
    legend,
    stage,
    element("p", { class: "muted keys" }, KEY_HELP),
  );
  const main = element("main", { class: "center" }, heading, messageArea, missing, picture, announcer.node);
  const body = element("div", { class: "body" }, main, side.node);
  fill(root, toolbar, body, runTable.node, large.node, tooltip.node);
  return { toolbar, stage, legend, heading, messageArea, missing, picture, sweep };
}

const EXAMPLE = `from telemetry import HookLogger

with HookLogger(model, "runs/first", every_n_steps=100) as logger:
    for inputs, targets in batches:
        loss = loss_function(model(inputs), targets)
        logger.log(loss=loss)  # alerts about the loss need it
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()`;

export function loadingMessage() {
  return message("loading", "Loading…", element("div", { class: "spinner", "aria-hidden": "true" }));
}

export function emptyMessage() {
  return message(
    "empty",
    "No run with telemetry yet",
    element("p", {}, "Wrap your loop, and its layers appear here:"),
    element("pre", {}, EXAMPLE),
    element(
      "p",
      { class: "muted" },
      "A new run appears after TensorBoard reloads its data. Runs with only scalars are under Time Series.",
    ),
  );
}

export function newerFormatMessage(text) {
  return message(
    "newer",
    "This run was written by a newer version of telemetry",
    element("p", {}, text),
    element("pre", {}, "pip install --upgrade torch-telemetry"),
  );
}

export function failureMessage(text, retry) {
  return message(
    "error",
    "The data could not be shown",
    element("p", { class: "failure" }, text),
    element("button", { onclick: retry }, "Try again"),
  );
}

function message(state, title, ...content) {
  return element(
    "div",
    { class: "message", role: "status", dataset: { state } },
    element("h1", {}, title),
    ...content,
  );
}
