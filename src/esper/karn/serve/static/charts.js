// Curves that can be read with mouse or keys: thin wiring around uPlot. The server sends numbers to draw
// and the same numbers as text, so that what is read here is what every other surface says.

import { el, setText } from "./dom.js";

const LABEL_ROOM = 116;
const FONT = "12px system-ui, sans-serif";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const LOOKS = {
  main: () => ({ stroke: colour("ink"), width: 2 }),
  ghost: () => ({ stroke: colour("twin"), width: 2, dash: [3, 3] }),
  steps: () => ({ stroke: colour("ink"), width: 2, paths: uPlot.paths.stepped({ align: -1 }) }),
  dots: () => ({
    stroke: colour("ink"),
    width: 0,
    paths: () => null,
    points: { show: true, size: 7, fill: colour("paper"), width: 2 },
  }),
  edge: () => ({ stroke: "transparent", width: 0, points: { show: false } }),
};
const redraws = new Set();

/** Draw all charts again, in the colours of the theme that holds now. */
export function repaint() {
  for (const redraw of redraws) redraw();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

/** What the axes of two charts must span so that they can be compared; x only where both count the same. */
export function sharedRanges(charts) {
  const known = charts.filter(Boolean);
  if (known.length < 2) return null;
  const ends = known.flatMap((chart) => [...chart.x, chart.end]);
  const heights = known[0].plots.map((_, at) => {
    const values = known.flatMap((chart) => numbersOf(chart.plots[at]));
    return values.length ? [Math.min(...values), Math.max(...values)] : null;
  });
  return { x: known[0].axis === known[1].axis ? [Math.min(...ends), Math.max(...ends)] : null, y: heights };
}

function numbersOf(plot) {
  const columns = [
    ...plot.lines.map((line) => line.values),
    ...plot.fans.flatMap((fan) => [fan.low, fan.high]),
  ];
  return columns.flat().filter((value) => value !== null);
}

/** An element that shows a chart and takes new numbers by `show(chart, ranges)`; `close()` lets go of it. */
export function chartElement(label) {
  const readout = el("div", { className: "chart-title mono", "aria-live": "off" });
  const canvas = el("div", {
    className: "chart",
    tabIndex: 0,
    role: "img",
    "aria-label": `${label}; arrow keys read values`,
  });
  const element = el("div", {}, canvas, readout);
  const sync = `chart-${Math.random()}`;
  let plots = [];
  let shown = null;
  let sharedWith = null;
  let at = null;

  function read(index) {
    at = index;
    if (!shown || !shown.x.length) return setText(readout, "");
    const place = index ?? shown.x.length - 1;
    const values = shown.plots.flatMap((plot) =>
      plot.lines.map((line) => `${line.label} ${line.texts[place]}`),
    );
    setText(readout, [`${shown.axis} ${shown.places[place]}`, ...values].join("   "));
  }

  function noteLimits() {
    canvas.dataset.limits = JSON.stringify(plots.map((one) => one.limits().y));
  }

  function draw() {
    plots.forEach(({ plot }) => plot.destroy());
    plots = [];
    if (!shown || !canvas.clientWidth) return;
    plots = shown.plots.map((_, index) => onePlot(canvas, shown, index, sharedWith, sync, read));
    noteLimits();
    read(null);
  }

  function show(chart, ranges = null) {
    const isSameShape =
      shown &&
      plots.length === chart.plots.length &&
      chart.plots.every(
        (plot, index) =>
          plot.lines.length === shown.plots[index].lines.length &&
          plot.fans.length === shown.plots[index].fans.length,
      );
    shown = chart;
    sharedWith = ranges;
    if (!isSameShape) return draw();
    plots.forEach(({ update }) => update(chart, ranges));
    noteLimits();
    read(at !== null && at < chart.x.length ? at : null);
  }

  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !plots.length || !shown.x.length) return;
    event.preventDefault();
    event.stopPropagation();
    const next = Math.min(Math.max((at ?? shown.x.length) + step, 0), shown.x.length - 1);
    const left = plots[0].plot.valToPos(shown.x[next], "x");
    plots.forEach(({ plot }) => plot.setCursor({ left, top: -10 }, false));
    read(next);
  });
  const observer = new ResizeObserver(() => {
    if (!plots.length) draw();
    else plots.forEach(({ plot }) => plot.setSize({ width: canvas.clientWidth, height: plot.height }));
  });
  observer.observe(canvas);
  redraws.add(draw);
  return {
    element,
    show,
    close() {
      observer.disconnect();
      redraws.delete(draw);
      plots.forEach(({ plot }) => plot.destroy());
    },
  };
}

/** The x values, then per fan its two edges, then the lines. */
function columnsOf(chart, index) {
  const plot = chart.plots[index];
  return [
    chart.x,
    ...plot.fans.flatMap((fan) => [fan.low, fan.high]),
    ...plot.lines.map((line) => line.values),
  ];
}

function limitsOf(chart, index, ranges) {
  const plot = chart.plots[index];
  const values = ranges?.y[index] ?? numbersOf(plot);
  const low = Math.min(...values, plot.floor ?? Infinity);
  const high = Math.max(...values);
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const [first, last] = ranges?.x ?? [Math.min(...chart.x), chart.end];
  return { x: [first, Math.max(last, first + 1)], y: [low === plot.floor ? low : low - room, high + room] };
}

function onePlot(parent, chart, index, ranges, sync, read) {
  const drawn = chart.plots[index];
  const isLast = index === chart.plots.length - 1;
  const shown = { chart, limits: limitsOf(chart, index, ranges) };
  const axis = {
    stroke: colour("dim"),
    grid: { stroke: colour("grid"), width: 1 },
    ticks: { show: false },
    font: FONT,
  };
  const fill = (isInner) => colour("ink") + (isInner ? "2e" : "18");
  const plot = new uPlot(
    {
      width: parent.clientWidth,
      height: drawn.height + (isLast ? 26 : 0),
      padding: [8, LABEL_ROOM, isLast ? 0 : 8, 0],
      legend: { show: false },
      cursor: { sync: { key: sync }, y: false, points: { size: 6 } },
      scales: {
        // A part that was chosen by dragging stays; a double click shows all again.
        x: {
          time: false,
          range: (_, low, high) => (isPart(shown, low, high) ? [low, high] : shown.limits.x),
        },
        y: { range: () => shown.limits.y },
      },
      axes: [
        {
          ...axis,
          show: isLast,
          size: 26,
          incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000],
        },
        { ...axis, size: 52, space: drawn.height < 100 ? 20 : 32 },
      ],
      series: [
        {},
        ...drawn.fans.flatMap(() => [LOOKS.edge(), LOOKS.edge()]),
        ...drawn.lines.map((line) => ({ points: { show: isAlone }, ...LOOKS[line.look]() })),
      ],
      bands: drawn.fans.map((fan, at) => ({ series: [2 + 2 * at, 1 + 2 * at], fill: fill(fan.inner) })),
      hooks: {
        draw: [(self) => labelEnds(self, shown.chart, index)],
        setCursor: [
          (self) => {
            if (self.cursor.event) read(self.cursor.idx ?? null);
          },
        ],
      },
    },
    columnsOf(chart, index),
    parent,
  );
  return {
    plot,
    limits: () => shown.limits,
    update(later, laterRanges) {
      const { min, max } = plot.scales.x;
      const stays = isPart(shown, min, max);
      shown.chart = later;
      shown.limits = limitsOf(later, index, laterRanges);
      plot.setData(columnsOf(later, index), !stays);
      if (stays) plot.redraw();
    },
  };
}

/** A line of one point is a dot. */
function isAlone(self) {
  return self.data[0].length < 2;
}

function isPart({ chart }, low, high) {
  return low > chart.x[0] || high < chart.x[chart.x.length - 1];
}

/** Direct labels instead of a legend: each line's name and last value, where it ends. */
function labelEnds(self, chart, index) {
  const { ctx } = self;
  const scale = devicePixelRatio;
  const ends = chart.plots[index].lines
    .map((line) => {
      const last = line.values.findLastIndex((value) => value !== null);
      return last < 0 ? null : { line, last, y: self.valToPos(line.values[last], "y", true) };
    })
    .filter(Boolean)
    .sort((one, other) => one.y - other.y);
  ends.forEach((end, at) => {
    if (at && end.y - ends[at - 1].y < 15 * scale) end.y = ends[at - 1].y + 15 * scale;
  });
  ctx.save();
  ctx.font = `${12 * scale}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  for (const { line, last, y } of ends) {
    const x = Math.min(self.valToPos(chart.x[last], "x", true), self.bbox.left + self.bbox.width) + 7 * scale;
    ctx.fillStyle = colour(line.look === "ghost" ? "dim" : "ink");
    ctx.fillText(`${line.label} ${line.texts[last]}`, x, y);
  }
  ctx.restore();
}
