// One chart: uPlot with the page's colours, a readout, keys, and a table behind it.
import { html, useEffect, useRef, useState } from "./ui.js";
import { short, visible } from "./lib.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const HEIGHT = 170;
const ROWS_OF_TABLE = 60;
const NO_MARKS = [];
const NEAR = "40px"; // a chart farther from what is seen is drawn when it comes nearer

/**
 * series: [{label, values, raw?, low?, high?}] over `steps`; raw: drawn faintly behind; low and high: a band.
 * onPick(step): a click or Enter on a point. A chart that is not near what is seen stays as it is.
 */
export function Chart(props) {
  const place = useRef(null), kept = useRef(null), [near, setNear] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver((entries) => setNear(entries.at(-1).isIntersecting), { rootMargin: NEAR });
    observer.observe(place.current);
    return () => observer.disconnect();
  }, []);
  if (near || !kept.current) kept.current = html`<${Drawn} ...${props} place=${place} near=${near} />`;
  return kept.current;
}

function Drawn({ title, note, steps, series, marks = NO_MARKS, onPick, theme, percent, of = "step", place, near }) {
  const plot = useRef(null), picked = useRef(null);
  const [hover, setHover] = useState(null);
  const [table, setTable] = useState(false);
  const shape = series.map((one) => [one.label, !!one.raw, !!one.low]).join();
  const say = (value) => (percent && value !== null && value !== undefined ? `${(100 * value).toFixed(1)} %` : short(value));

  useEffect(() => {
    const lines = [{}], bands = [], banded = series.filter(({ low }) => low).length; // several bands over each other would be mud
    series.forEach((one, number) => {
      const stroke = colour(`--c${(one.colour ?? number) % 8}`);
      if (one.low) {
        bands.push({ series: [lines.length, lines.length + 1], fill: `${stroke}${banded > 1 ? "12" : "26"}` });
        lines.push({ stroke: "transparent", width: 0, points: { show: false } }, { stroke: "transparent", width: 0, points: { show: false } });
      }
      if (one.raw) lines.push({ stroke: `${stroke}55`, width: 1, points: { show: false } });
      lines.push({ stroke, width: 1.75, spanGaps: true, points: { show: steps.length < 12 || !!one.dots, size: 6, fill: stroke } });
    });
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const made = new uPlot({
      width: place.current.clientWidth || 320, height: HEIGHT, bands, series: lines,
      legend: { show: false }, padding: [10, 18, 0, 0],
      scales: { x: { time: false }, y: { range: (u, low, high) => around(low, high) } },
      axes: [{ ...axis, size: 26, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5] },
        { ...axis, size: 46, space: 34, values: (u, ticks) => ticks.map((tick) => (percent ? `${Number((tick * 100).toPrecision(3))}%` : tickText(tick))) }],
      cursor: { y: false, drag: { x: true, y: false }, points: { size: 6 }, focus: { prox: 30 } },
      hooks: {
        setCursor: [(u) => setHover(u.cursor.idx ?? null)],
        draw: [(u) => drawMarks(u, marksRef.current)],
      },
    }, [[], ...lines.slice(1).map(() => [])], place.current);
    plot.current = made;
    const observer = new ResizeObserver(() => place.current && made.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    observer.observe(place.current);
    return () => { observer.disconnect(); made.destroy(); plot.current = null; };
  }, [shape, theme, steps.length < 12]);

  const marksRef = useRef(marks);
  marksRef.current = marks;
  useEffect(() => {
    if (!near) return;
    const columns = series.flatMap((one) => [...(one.low ? [one.high, one.low] : []), ...(one.raw ? [one.raw] : []), one.values]);
    plot.current.setData([steps, ...columns]);
  }, [near, steps, series, shape, theme, marks, steps.length < 12]);

  const at = hover ?? steps.length - 1;
  const marked = marks.filter(({ step }) => step === steps[at]).map(({ text }) => visible(text)).join("; ");
  const click = (event) => {
    const index = plot.current?.cursor.idx;
    if (!onPick || index === null || index === undefined || Math.abs(event.clientX - (picked.current ?? event.clientX)) > 4) return;
    onPick(steps[index]);
  };
  const keys = (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length };
    if (event.key in moves) {
      const next = Math.max(0, Math.min(steps.length - 1, at + moves[event.key]));
      const u = plot.current;
      u.setCursor({ left: u.valToPos(steps[next], "x"), top: 20 });
      event.preventDefault();
    } else if (event.key === "Enter" && onPick) onPick(steps[at]);
    else if (event.key === "t") setTable(!table);
  };
  const sentence = `${title} by ${of}. ${series.map((one) => `${one.label}: ${say(lastOf(one.values))}`).join(", ")} at ${of} ${steps.at(-1) ?? 0}.`;
  return html`<figure class="chart">
    <figcaption>
      <h3 title=${note}>${title}</h3>
      <span class="at" title=${marked}>${marked && html`<b>${marked}</b> `}${steps.length ? `${of} ${steps[at]}` : ""}</span>
      <button class="plain" title="the numbers as a table (key t on the chart)" aria-expanded=${table} onClick=${() => setTable(!table)}>table</button>
    </figcaption>
    <div class="legend">${series.map((one, number) => html`<span><i class=${`c${(one.colour ?? number) % 8}`}></i>${one.label} <b>${say(hover === null ? lastOf(one.raw ?? one.values) : (one.raw ?? one.values)[at])}</b></span>`)}</div>
    <div class="plot" ref=${place} tabindex="0" role="img" aria-label=${sentence} onKeyDown=${keys}
      onMouseDown=${(event) => { picked.current = event.clientX; }} onClick=${click}></div>
    ${table && html`<div class="scroll"><table class="numbers"><thead><tr><th>${of}</th>${series.map((one) => html`<th>${one.label}</th>`)}</tr></thead>
      <tbody>${steps.map((step, row) => row).slice(-ROWS_OF_TABLE).reverse().map((row) => html`<tr><td>${steps[row]}</td>${series.map((one) => html`<td>${say((one.raw ?? one.values)[row])}</td>`)}</tr>`)}</tbody></table></div>`}
  </figure>`;
}

function around(low, high) {
  if (low === null || high === null) return [0, 1];
  if (low >= 0 && high <= 1 && high > 0.3) return [0, 1.0001];
  const size = Math.max(Math.abs(low), Math.abs(high)), spread = high - low;
  const room = (spread > 1e-9 * size ? spread : size || 1) * 0.08; // less is the rounding of a constant
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

const tickText = (tick) => (tick !== 0 && Math.abs(tick) < 0.001 ? tick.toExponential(0) : Math.abs(tick) < 1e4 ? String(Number(tick.toPrecision(4))) : short(tick));

function lastOf(values) {
  for (let place = values.length - 1; place >= 0; place--) if (values[place] !== null && values[place] !== undefined) return values[place];
  return null;
}

function drawMarks(u, marks) {
  const { ctx, bbox } = u;
  for (const { step, colour: own } of marks) {
    const x = u.valToPos(step, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.save();
    ctx.strokeStyle = colour(own === undefined ? "--warn" : `--c${own % 8}`);
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  }
}
