// Messages in place of the picture.

import { element } from "./dom.js";

const EXAMPLE = `from telemetry import HookLogger

with HookLogger(model, "runs/first", every_n_steps=100):
    train()`;

export function loadingMessage() {
  return message(
    "loading",
    "Loading…",
    element("div", { class: "spinner", "aria-hidden": "true" }),
  );
}

export function emptyMessage() {
  return message(
    "empty",
    "No run with telemetry yet",
    element("p", {}, "Wrap your training, and its layers appear here:"),
    element("pre", {}, EXAMPLE),
    element(
      "p",
      { class: "muted" },
      "If a run has just begun, it shows after TensorBoard has reloaded its data.",
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
