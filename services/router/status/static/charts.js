"use strict";
// Small line charts in SVG. Points without a value leave a gap.

const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// A round figure at or above the highest value.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((step) => step >= value);
}

// Draws `lines`, each {class, values}, over `times` in seconds since the epoch.
function drawLines(place, times, lines, { top, format, label }) {
  const width = Math.max(place.clientWidth, 260), height = place.clientHeight || 144;
  const left = 56, right = 8, above = 10, below = 20;
  const found = lines.flatMap((line) => line.values).filter((value) => value !== null);
  const high = top ?? ceiling(Math.max(...found, 0));
  const first = times[0], span = Math.max(times[times.length - 1] - first, 1);
  const x = (time) => left + ((time - first) / span) * (width - left - right);
  const y = (value) => above + (1 - Math.min(value / high, 1)) * (height - above - below);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const part of [0, 0.5, 1]) {
    svg.append(
      shape("line", { x1: left, x2: width - right, y1: y(part * high), y2: y(part * high), class: "grid" }),
      shape("text", { x: left - 6, y: y(part * high) + 4, "text-anchor": "end" }, format(part * high)),
    );
  }
  const clock = (time) => new Date(time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  svg.append(shape("text", { x: left, y: height - 4 }, clock(first)));
  if (span > 90) {
    svg.append(shape("text", { x: width - right, y: height - 4, "text-anchor": "end" }, clock(first + span)));
  }
  for (const line of lines) {
    let path = "", before = null;
    line.values.forEach((value, index) => {
      if (value === null) return;
      const point = `${x(times[index]).toFixed(1)} ${y(value).toFixed(1)}`;
      path += (before === index - 1 ? "L" : "M") + point;
      before = index;
      svg.append(shape("circle", { cx: x(times[index]), cy: y(value), r: 1.8, class: line.class }));
    });
    if (path) svg.append(shape("path", { d: path, class: line.class }));
  }
  if (!found.length) {
    svg.append(shape("text", { x: (width + left) / 2, y: height / 2, "text-anchor": "middle" }, "nothing yet"));
  }
  place.replaceChildren(svg);
}
