/** The series of a chart block as series of ECharts, one drawing per type. */

import type { CustomSeriesRenderItem } from 'echarts';
import { looks, type Look, type Theme } from '../lib/colours';
import type { ChartBlock, Series } from '../lib/types';
import { isolated, stack } from './data';
import { plotHeight, plotWidth } from './geometry';
import { painted } from './heat';
import type { Drawing, View } from './option';
import { decalOf } from './patterns';

type Values = readonly (number | null)[];
type Point = [number, number | null];

/** Narrower bars, one beside the other, are drawn as one area: gaps between them would flicker. */
const MIN_BAR = 3;
/** Narrower ones would not be seen. */
const LEAST_BAR = 2;
const MAX_BAR = 36;
const DOTS_UP_TO = 40;
const FAINT = 0.45;
const SYMBOLS = ['circle', 'rect', 'triangle', 'diamond'] as const;

export function seriesOf(view: View): Drawing[] {
  const { shape } = view;
  if (shape.drawn === 'heat') return [cells(view)];
  if (shape.drawn === 'interval') return shown(view).map(({ series, look, at }) => interval(view, series, look, at));
  if (shape.drawn === 'scatter') return shown(view).map(({ series, look, at }) => scatter(view, series, look, at));
  if (shape.drawn === 'line') return shown(view).flatMap(({ series, look, at }) => line(view, series, look, at));
  if (shape.stacked) return stacked(view);
  return shape.numeric ? numberBars(view) : nameBars(view);
}

/** How the series look: faint values as the line that smooths them. */
export function pairedLooks(block: ChartBlock, theme: Theme): Look[] {
  const own = looks(block.series.filter((series) => series.faint !== true).map((series) => series.role), theme);
  let next = 0;
  return block.series.flatMap((series) => own[series.faint === true ? next : next++] ?? []);
}

interface Shown { series: Series; look: Look; at: number }

function shown({ block, looks, hidden }: View): Shown[] {
  return block.series.flatMap((series, at) => {
    const look = looks[at];
    return hidden.has(at) || look === undefined ? [] : [{ series, look, at }];
  });
}

function points(view: View, values: Values): Point[] {
  return view.shape.at.map((x, at) => [x, values[at] ?? null]);
}

/** What all series have in common: nothing reacts to the pointer, and z-order is ours. */
function common(name: string, z: number): { name: string; z: number; silent: true; animation: false } {
  return { name, z, silent: true, animation: false };
}

function line(view: View, series: Series, look: Look, at: number): Drawing[] {
  const odd = new Set((series.odd ?? []).map(([position]) => position));
  const data = points(view, series.values).filter(([, value], position) => series.joined !== true || value !== null || odd.has(position));
  const few = data.length <= DOTS_UP_TO;
  const alone = isolated(data.map(([, value]) => value));
  const single = view.block.series.length === 1 || series.faint === true;
  const drawn: Drawing = {
    ...common(series.name, 3 + at),
    type: 'line', data, symbol: SYMBOLS[at % SYMBOLS.length] ?? 'circle', ...(series.held === true ? { step: 'end' as const } : {}),
    symbolSize: (_: unknown, item: { dataIndex: number }) => (few ? 5 : alone.has(item.dataIndex) ? 4 : 0),
    showAllSymbol: true, clip: true,
    lineStyle: { color: look.colour, width: series.faint === true ? 1 : 1.75, opacity: series.faint === true ? FAINT : 1, type: single || look.dash.length === 0 ? 'solid' : [...look.dash], join: 'round' },
    itemStyle: { color: look.colour, opacity: series.faint === true ? FAINT : 1 },
  };
  return [...band(view, series, look, at), drawn, ...oddities(view, series, look, at)];
}

/** A cross at the upper edge for each value that is not finite, at the lower edge for -inf. */
function oddities(view: View, series: Series, look: Look, at: number): Drawing[] {
  const data = (series.odd ?? []).map(([position, word]) => ({
    value: [view.shape.at[position] ?? 0, word === '-inf' ? view.values.min : view.values.max], symbolOffset: [0, word === '-inf' ? -6 : 6],
  }));
  if (data.length === 0) return [];
  const style = { color: 'transparent', borderColor: look.colour, borderWidth: 2 };
  return [{ ...common(series.name, 20 + at), type: 'scatter', data, symbol: 'path://M0 0L10 10M10 0L0 10', symbolSize: 9, clip: false, itemStyle: style }];
}

/** All cells as one picture, so that a map of many layers is no more work than a line. */
function cells(view: View): Drawing {
  const { left, top } = view.geometry;
  const image = painted(view);
  const style = { image, x: left, y: top, width: plotWidth(view.geometry), height: plotHeight(view.geometry) };
  const render: CustomSeriesRenderItem = () => ({ type: 'image', style, silent: true });
  return { ...common(view.block.title, 3), type: 'custom', renderItem: render, data: [[view.shown[0], 0]], clip: true };
}

/** The interval around a line: its upper edge filled, and what lies below the lower edge covered by the page again. */
function band(view: View, series: Series, look: Look, at: number): Drawing[] {
  if (series.low === undefined || series.high === undefined) return [];
  const { low, high } = series;
  const render: CustomSeriesRenderItem = (_, api) => {
    const upper: number[][] = [];
    const lower: number[][] = [];
    view.shape.at.forEach((x, index) => {
      const [from, to] = [low[index] ?? null, high[index] ?? null];
      if (from === null || to === null) return;
      upper.push(api.coord([x, to]));
      lower.unshift(api.coord([x, from]));
    });
    return { type: 'polygon', shape: { points: [...upper, ...lower] }, style: { fill: look.colour, opacity: 0.16 }, silent: true };
  };
  return [{ ...common(series.name, 2 + at), type: 'custom', renderItem: render, data: [0], clip: true }];
}

function scatter(view: View, series: Series, look: Look, at: number): Drawing {
  return {
    ...common(series.name, 3 + at),
    type: 'scatter', data: points(view, series.values), symbol: SYMBOLS[at % SYMBOLS.length] ?? 'circle', symbolSize: 7, clip: true,
    itemStyle: { color: look.colour, opacity: 0.85, borderColor: view.ink.surface, borderWidth: 0.5 },
  };
}

/** px of a bar of numeric x. */
function barWidth(view: View): number {
  return (view.shape.width / (view.shown[1] - view.shown[0])) * plotWidth(view.geometry);
}

/** Whether lines between areas would hide what is narrow. */
function isCrowded(view: View): boolean {
  const { at } = view.shape;
  const points = at.filter((x) => x >= view.shown[0] && x <= view.shown[1]).length;
  return points > plotWidth(view.geometry) / 12;
}

function isDense(view: View): boolean {
  return view.shape.numeric && barWidth(view) < MIN_BAR && view.shape.at.length > plotWidth(view.geometry) / 3;
}

/** The highest edge first, so that each part covers what of it belongs to the parts below. */
function stacked(view: View): Drawing[] {
  const edges = stack(view.block.series, view.hidden);
  const filled = view.shape.drawn === 'area' || isDense(view);
  return shown(view).reverse().map(({ series, look, at }, order) => {
    const edge = edges[at] ?? [];
    return filled ? area(view, series, look, edge, order) : bar(view, series, look, edge, order, '-100%');
  });
}

function area(view: View, series: Series, look: Look, edge: Values, order: number): Drawing {
  const decal = decalOf(look.pattern, view.theme);
  return {
    ...common(series.name, 3 + order),
    type: 'line', data: points(view, edge), symbol: 'none', clip: true,
    // what belongs to a step holds for all of it
    ...(view.shape.drawn === 'bars' || view.block.select === 'steps' ? { step: 'middle' as const } : {}),
    areaStyle: { color: look.colour, opacity: 1, origin: 'start' },
    lineStyle: { color: view.ink.surface, width: isCrowded(view) ? 0 : 0.75, ...(decal === 'none' ? {} : { decal }) },
    itemStyle: { color: look.colour, ...(decal === 'none' ? {} : { decal }) },
  } as Drawing;
}

function bar(view: View, series: Series, look: Look, values: Values, order: number, gap: string): Drawing {
  const { shape, theme } = view;
  const data = shape.numeric ? points(view, values) : shape.at.map((_, at) => values[at] ?? null);
  const beside = shape.numeric && !shape.stacked ? Math.max(1, shown(view).length) : 1;
  const most = view.block.type === 'histogram' ? Infinity : MAX_BAR * beside;
  const touching = shape.numeric ? Math.max(LEAST_BAR, Math.min(barWidth(view), most) - 1) / beside : undefined;
  const decal = decalOf(look.pattern, theme);
  return {
    ...common(series.name, 3 + order),
    type: 'bar', data, barGap: gap, clip: true,
    ...(touching === undefined ? { barMaxWidth: MAX_BAR, barCategoryGap: '28%' } : { barWidth: touching }),
    itemStyle: {
      color: look.colour, ...(decal === 'none' || view.block.series.length === 1 ? {} : { decal }),
      ...(shape.stacked ? { borderColor: view.ink.surface, borderWidth: 0.5 } : {}),
    },
  } as Drawing;
}

/** Several on the same x stand beside each other. */
function numberBars(view: View): Drawing[] {
  const draw = isDense(view)
    ? ({ series, look }: Shown, order: number) => area(view, series, look, series.values, order)
    : ({ series, look }: Shown, order: number) => bar(view, series, look, series.values, order, '0%');
  return shown(view).map(draw);
}

function nameBars(view: View): Drawing[] {
  return shown(view).map(({ series, look }, order) => bar(view, series, look, series.values, order, '12%'));
}

const CAP = 4;
const POINT = 4;

/** A line from low to high with caps, and a filled point; without low and high a hollow one, as a prediction is. */
function interval(view: View, series: Series, look: Look, at: number): Drawing {
  const rows = view.shape.names.length;
  const render: CustomSeriesRenderItem = (params, api) => {
    const row = params.dataIndex;
    const [value, low, high] = [series.values[row] ?? null, series.low?.[row] ?? null, series.high?.[row] ?? null];
    const height = (view.geometry.height - view.geometry.top - view.geometry.bottom) / Math.max(rows, 1);
    const offset = (at - (view.block.series.length - 1) / 2) * Math.min(12, height / (view.block.series.length + 1));
    const place = (x: number): [number, number] => {
      const [left = 0, top = 0] = api.coord([x, row]);
      return [left, top + offset];
    };
    const children: object[] = low === null || high === null ? [] : whisker(place(low), place(high), look.colour);
    for (const each of series.points?.[row] ?? []) if (each !== null) children.push(point(place(each), look.colour));
    if (value !== null) children.push(dot(place(value), look, low !== null && high !== null, view.ink.surface));
    return { type: 'group', children } as ReturnType<CustomSeriesRenderItem>;
  };
  const data = view.shape.names.map((_, row) => [series.values[row] ?? 0, row]);
  return { ...common(series.name, 3 + at), type: 'custom', renderItem: render, data, encode: { x: 0, y: 1 }, clip: true };
}

function whisker([left, y]: [number, number], [right]: [number, number], colour: string): object[] {
  const style = { stroke: colour, lineWidth: 2 };
  const stroke = (x1: number, y1: number, x2: number, y2: number): object => ({ type: 'line', shape: { x1, y1, x2, y2 }, style });
  return [stroke(left, y, right, y), stroke(left, y - CAP, left, y + CAP), stroke(right, y - CAP, right, y + CAP)];
}

function point([cx, cy]: [number, number], colour: string): object {
  return { type: 'circle', shape: { cx, cy, r: 2 }, style: { fill: colour, opacity: 0.6 } };
}

function dot([cx, cy]: [number, number], look: Look, filled: boolean, surface: string): object {
  const style = { fill: filled ? look.colour : surface, stroke: look.colour, lineWidth: 2 };
  if (filled) return { type: 'circle', shape: { cx, cy, r: POINT }, style };
  const corners = [[cx, cy - POINT - 1], [cx + POINT + 1, cy], [cx, cy + POINT + 1], [cx - POINT - 1, cy]];
  return { type: 'polygon', shape: { points: corners }, style };
}
