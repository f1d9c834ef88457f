// Numbers and alerts as people read them.

/** Three digits; powers of ten far from 1. */
export function formatNumber(value) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return shorten(value.toExponential(2)).replace("e+", "e");
  if (size >= 100) return String(Math.round(value));
  return shorten(value.toPrecision(3));
}

/** A value of a statistic: shares in percent. */
export function formatValue({ unit }, value) {
  if (value < 0) return "not measured";
  const isShare = unit === "share" && Number.isFinite(value);
  return isShare ? `${formatNumber(value * 100)} %` : formatNumber(value);
}

/** With thin spaces between thousands. */
export function formatStep(step) {
  return String(Math.round(step)).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

/** Without zeros at the end of the fraction; those of an exponent stay. */
function shorten(text) {
  return text.replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "");
}

export function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Kind and stage; of an escalated alert, the consequence that escalated it. */
export function alertTitle({ kind, stage, consequences }) {
  const latest = consequences.at(-1);
  const now = stage === "escalated" ? (latest ? `, then ${faultText(latest)}` : ", escalated") : "";
  return kindTitle(kind) + (stage === "resolved" ? ", resolved" : now);
}

/** A kind of fault and its layer, within a sentence. */
export function faultText({ kind, module_name: layer }) {
  return kindText(kind) + (layer ? ` in ${layer}` : "");
}

function kindText(kind) {
  return kind === "nonfinite" ? "NaN or infinity" : kind.replaceAll("_", " ");
}

/** A kind of alert as a title. */
export function kindTitle(kind) {
  return capital(kindText(kind));
}

export function alertAloud(alert) {
  return `${alert.severity} at step ${formatStep(alert.step)}: ${capital(faultText(alert))}.`;
}

/** The layers that an alert names: the culprit, where it was observed, and, until it resolves, the consequences. */
export function layersOf({ module_name: culprit, observed_in: observed, stage, consequences }) {
  return [culprit, observed, ...(stage === "resolved" ? [] : consequences.map((known) => known.module_name))];
}
