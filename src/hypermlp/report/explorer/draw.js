// Pictures on canvases: bands of bars that share an axis of slots, heat maps, lines. Colours come from the page's style.
"use strict";

// Looked up once per drawing: asking the browser for every bar would take longer than drawing it.
const palette = new Map();

function styleOf(name) {
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return palette.get(name);
}

const signed = (value, alpha) => `rgb(${styleOf(value >= 0 ? "--up" : "--down")} / ${alpha})`;

function prepare(canvas, height) {
  const width = canvas.clientWidth || canvas.parentElement.clientWidth, ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  ctx.font = "12px system-ui, sans-serif";
  return { ctx, width, height };
}

const BAND = 62, GAP = 24, LEFT = 6, AXIS = 20;

// bands: [{label, values, dim(i), outline(i), marks(i)}]; order maps column → place on the axis.
function drawBands(canvas, bands, n, order, chosen, axis) {
  const { ctx, width } = prepare(canvas, bands.length * (BAND + GAP) + AXIS), step = (width - 2 * LEFT) / n;
  const x = (i) => LEFT + order(i) * step, bar = Math.max(0.6, step > 3 ? step - 1 : step * 0.9);
  bands.forEach((band, row) => {
    const top = row * (BAND + GAP) + GAP - 6;
    const sizes = band.outline ? [...band.values, ...band.outline] : band.values;
    const high = sizes.reduce((m, v) => Math.max(m, v), 0), low = sizes.reduce((m, v) => Math.min(m, v), 0);
    const scale = BAND / (high - low || 1), zero = top + high * scale;
    ctx.fillStyle = styleOf("--ink");
    ctx.textAlign = "left";
    ctx.font = "600 12px system-ui, sans-serif";
    ctx.fillText(band.label, LEFT, top - 5);
    const named = ctx.measureText(band.label).width;
    ctx.font = "12px system-ui, sans-serif";
    ctx.fillStyle = styleOf("--soft");
    ctx.textAlign = "right";
    const range = low < 0 ? `${number(low)} to ${number(high)}` : `up to ${number(high)}`;
    if (named + ctx.measureText(range).width + 20 < width) ctx.fillText(range, width - LEFT, top - 5);
    ctx.fillStyle = styleOf("--line");
    ctx.fillRect(LEFT, zero - 0.5, width - 2 * LEFT, 1);
    for (let i = 0; i < n; i++) {
      const value = band.values[i], size = Math.max(Math.abs(value) * scale, value ? 0.75 : 0);
      ctx.fillStyle = band.dim && band.dim(i) ? styleOf("--off") : signed(value, 0.9);
      ctx.fillRect(x(i), value >= 0 ? zero - size : zero, bar, size);
      if (band.outline) {
        ctx.fillStyle = styleOf("--ink");
        ctx.fillRect(x(i), zero - band.outline[i] * scale - 0.75, Math.max(bar, 1.5), 1.5);
      }
    }
    if (band.marks) {
      for (let i = 0; i < n; i++) {
        const mark = band.marks(i);
        if (!mark) continue;
        ctx.fillStyle = mark > 0 ? styleOf("--on") : styleOf("--gone");
        ctx.fillRect(x(i), top + BAND + 2, Math.max(bar, 2), 4);
      }
    }
  });
  if (chosen !== null && chosen < n) {
    ctx.strokeStyle = styleOf("--ink");
    ctx.setLineDash([3, 3]);
    ctx.strokeRect(x(chosen) - 1.5, GAP - 8, bar + 3, bands.length * (BAND + GAP) - GAP + 8);
    ctx.setLineDash([]);
  }
  ctx.fillStyle = styleOf("--soft");
  const bottom = bands.length * (BAND + GAP) + 12;
  ctx.textAlign = "left";
  ctx.fillText(axis[0], LEFT, bottom);
  ctx.textAlign = "right";
  ctx.fillText(axis[1], width - LEFT, bottom);
  return (px) => Math.floor((px - LEFT) / step); // place on the axis under the mouse
}

const MOST_CELLS = 128;

// A Diag(s) Bᵀ with lag 0 at the top left; more lags than cells are averaged, which the factors allow exactly.
function drawMap(canvas, op, transpose) {
  const side = Math.min(canvas.parentElement.clientWidth, 320), { ctx } = prepare(canvas, side);
  const group = Math.ceil(op.n / MOST_CELLS), cells = Math.ceil(op.n / group), R = op.R;
  const mean = (F) => {
    const out = new Float64Array(cells * R);
    for (let c = 0; c < op.n; c++) {
      const lag = op.n - 1 - c, cell = Math.floor(lag / group), size = Math.min(group, op.n - cell * group);
      for (let r = 0; r < R; r++) out[cell * R + r] += F[c * R + r] / size;
    }
    return out;
  };
  const rows = mean(transpose ? op.B : op.A), columns = mean(transpose ? op.A : op.B), values = new Float64Array(cells * cells);
  let top = 0;
  for (let y = 0; y < cells; y++) {
    for (let x = 0; x < cells; x++) {
      let sum = 0;
      for (let r = 0; r < R; r++) sum += rows[y * R + r] * op.s[r] * columns[x * R + r];
      values[y * cells + x] = sum;
      top = Math.max(top, Math.abs(sum));
    }
  }
  const image = new ImageData(cells, cells), up = styleOf("--up").split(" "), down = styleOf("--down").split(" ");
  values.forEach((value, i) => {
    const colour = value >= 0 ? up : down;
    for (let e = 0; e < 3; e++) image.data[4 * i + e] = Number(colour[e]);
    image.data[4 * i + 3] = top ? Math.round((255 * Math.abs(value)) / top) : 0;
  });
  const small = document.createElement("canvas");
  small.width = small.height = cells;
  small.getContext("2d").putImageData(image, 0, 0);
  canvas.style.width = `${side}px`;
  canvas.width = canvas.height = Math.round(side * (window.devicePixelRatio || 1));
  const plain = canvas.getContext("2d");
  plain.imageSmoothingEnabled = false;
  plain.drawImage(small, 0, 0, canvas.width, canvas.height);
  return { top, group };
}

// lines: [{label, values, colour}], values by lag from 0.
function drawLines(canvas, lines) {
  const { ctx, width, height } = prepare(canvas, 150), left = 58, bottom = height - 22, top = 10;
  const every = lines.flatMap((line) => [...line.values]), n = lines[0].values.length;
  let low = every.reduce((m, v) => Math.min(m, v), 0), high = every.reduce((m, v) => Math.max(m, v), 0);
  if (low === high) high = low + 1;
  const x = (i) => left + ((width - left - 8) * i) / Math.max(n - 1, 1), y = (v) => top + ((bottom - top) * (high - v)) / (high - low);
  ctx.strokeStyle = styleOf("--line");
  ctx.fillStyle = styleOf("--soft");
  for (const value of new Set([low, 0, high])) {
    ctx.beginPath();
    ctx.moveTo(left, y(value));
    ctx.lineTo(width - 8, y(value));
    ctx.stroke();
    ctx.textAlign = "right";
    if (value === 0 || Math.abs(y(value) - y(0)) > 12) ctx.fillText(number(value), left - 6, y(value) + 4);
  }
  ctx.textAlign = "left";
  ctx.fillText("lag 0", left, height - 4);
  ctx.textAlign = "right";
  ctx.fillText(`lag ${n - 1}`, width - 8, height - 4);
  lines.forEach((line, k) => {
    ctx.strokeStyle = styleOf(line.colour);
    ctx.lineWidth = 1.8;
    ctx.setLineDash(k === 1 ? [5, 3] : k === 2 ? [2, 2] : []);
    ctx.beginPath();
    line.values.forEach((value, i) => (i ? ctx.lineTo(x(i), y(value)) : ctx.moveTo(x(i), y(value))));
    ctx.stroke();
    ctx.setLineDash([]);
  });
}

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1000 || size < 0.001 ? value.toExponential(1) : value.toPrecision(3);
  return text.replace("-", "−");
}
