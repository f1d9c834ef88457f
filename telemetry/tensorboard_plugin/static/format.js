// Numbers, ticks of axes and alerts as people read them.

/** A number, or the end of a range that is nearest to it; the lower end of a range without room. */
export function clamp(value, low, high) {
  return Math.max(Math.min(value, high), low);
}

/** Three digits; powers of ten far from 1. */
export function formatNumber(value) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).split("e").map(Number).join("e");
  return String(size >= 100 ? Math.round(value) : Number(value.toPrecision(3)));
}

/** A value of a statistic: shares in percent. */
export function formatValue({ unit }, value) {
  if (value < 0) return "not measured";
  const isShare = unit === "share" && Number.isFinite(value);
  return isShare ? `${formatNumber(value * 100)} %` : formatNumber(value);
}

/** With thin spaces between thousands, as in French. */
export const formatStep = new Intl.NumberFormat("fr", { maximumFractionDigits: 0 }).format;

/** Round numbers between two ends, at most `count` or so. */
export function roundTicks(low, high, count, whole) {
  const rough = (high - low) / Math.max(count, 1);
  if (!(rough > 0) || !Number.isFinite(rough)) return [];
  const power = 10 ** Math.floor(Math.log10(rough));
  const round = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const stride = whole ? Math.max(1, Math.round(round)) : round;
  const first = Math.ceil(low / stride - 1e-9);
  const last = Math.floor(high / stride + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * stride);
}

/**
 * Round numbers between two positive ones, at most `count` or so: powers of ten, or with twos and
 * fives between them where there are few.
 */
export function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low));
  const powers = Array.from({ length: Math.ceil(Math.log10(high)) - first + 1 }, (_, i) => first + i);
  const isInside = (tick) => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9);
  const ticksAt = (power, digits) => digits.map((digit) => Number(`${digit}e${power}`)).filter(isInside);
  const inside = (...digits) => powers.flatMap((power) => ticksAt(power, digits));
  const tens = inside(1);
  const eachNth = tens.map((_, i) => tens.filter((_, at) => at % (i + 1) === 0));
  const choices = [inside(1, 2, 5), inside(1, 3), ...eachNth];
  const fitting = choices.find((ticks) => ticks.length >= 2 && ticks.length <= Math.max(count, 2));
  return fitting ?? roundTicks(low, high, count, false).filter((tick) => tick > 0);
}

export function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Kind and stage; of an escalated alert, the consequence that escalated it. */
export function alertTitle({ kind, stage, consequences }) {
  const latest = consequences.at(-1);
  const now = stage === "escalated" ? (latest ? `, then ${faultText(latest)}` : ", escalated") : "";
  return capital(faultText({ kind })) + (stage === "resolved" ? ", resolved" : now);
}

export function faultText({ kind, module_name: layer }) {
  const text = kind === "nonfinite" ? "NaN or infinity" : kind.replaceAll("_", " ");
  return layer ? `${text} in ${layer}` : text;
}

export function alertAloud(alert) {
  return `${alert.severity} at step ${formatStep(alert.step)}: ${capital(faultText(alert))}.`;
}

/** The layers that an alert names: the culprit, where it was observed, and, until it resolves, the consequences. */
export function layersOf({ module_name: culprit, observed_in: observed, stage, consequences }) {
  return [culprit, observed, ...(stage === "resolved" ? [] : consequences.map((known) => known.module_name))];
}
