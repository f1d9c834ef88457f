// The mark of an alert in the picture.

/** A diamond for an error, a triangle for a warning, a dot for a note; its border shows anywhere. */
export function drawAlertMark(context, theme, alert, x, y) {
  context.beginPath();
  if (alert.severity === "note") {
    context.arc(x, y, 4, 0, 2 * Math.PI);
  } else if (alert.severity === "error") {
    [
      [0, -6],
      [6, 0],
      [0, 6],
      [-6, 0],
    ].forEach(([dx, dy]) => context.lineTo(x + dx, y + dy));
  } else {
    [
      [0, -6],
      [6, 5],
      [-6, 5],
    ].forEach(([dx, dy]) => context.lineTo(x + dx, y + dy));
  }
  context.closePath();
  context.fillStyle = theme[alert.severity];
  context.fill();
  context.lineWidth = 1.5;
  context.strokeStyle = "#ffffff";
  context.stroke();
}
