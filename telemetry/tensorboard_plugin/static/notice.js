// What the picture leaves out, in words.

/** A notice about what the picture leaves out; "" if it shows everything. */
export function noticeOf(field, statistic) {
  if (!field.steps.length) return `${statistic.title}: not measured so far.`;
  const parts = [];
  if (field.layerFactor > 1) parts.push(`${field.layerFactor} layers`);
  if (field.stepFactor > 1) parts.push(`${field.stepFactor} steps`);
  const notices = [];
  if (parts.length) notices.push(`Thinned out: each cell is the largest of ${parts.join(" × ")}.`);
  if (field.sampled) notices.push("Too much to read at once: some steps are left out.");
  if (notices.length) return [...notices, field.isAll ? "" : "Zoom in to see all."].join(" ");
  return field.values.some((value) => value >= 0 || value !== value)
    ? ""
    : `${statistic.title}: not measured for any layer of this run.`;
}
