/** The colours of a heat map: one scale for all rows, logarithmic where values are many times each other. */

import type { Theme } from '../lib/colours';
import { scalar } from '../lib/format';
import type { ChartBlock } from '../lib/types';
import { pixelOf, plotHeight, plotWidth } from './geometry';
import type { View } from './option';

export interface HeatScale { low: number; high: number; log: boolean }

/** From low to high, red, green and blue. */
const ENDS: Record<Theme, readonly [readonly number[], readonly number[]]> = {
  light: [[222, 234, 250], [16, 52, 112]],
  dark: [[28, 44, 70], [168, 208, 255]],
};
const LOG_FROM = 100;

export function heatScale(block: ChartBlock): HeatScale {
  const values = block.series.flatMap((series) => series.values.filter((value): value is number => value !== null));
  const low = values.reduce((least, value) => Math.min(least, value), Infinity);
  const high = values.reduce((most, value) => Math.max(most, value), -Infinity);
  if (!Number.isFinite(low)) return { low: 0, high: 1, log: false };
  // ends that the page sets: what is below the first is shown as it, and little stays pale
  if (block.y.min !== null || block.y.max !== null) return { low: block.y.min ?? low, high: Math.max(high, block.y.max ?? high), log: false };
  const least = values.reduce((found, value) => (value > 0 ? Math.min(found, value) : found), Infinity);
  return low >= 0 && high > LOG_FROM * least ? { low: least, high, log: true } : { low, high, log: false };
}

/** Where a value stands on the scale, 0 to 1. */
export function shareOf(value: number, { low, high, log }: HeatScale): number {
  if (high <= low || value <= low) return 0;
  return log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
}

export function shade(share: number, theme: Theme): string {
  const [from, to] = ENDS[theme];
  return `rgb(${from.map((part, at) => Math.round(part + share * ((to[at] ?? 0) - part))).join(', ')})`;
}

export function scaleText({ low, high, log }: HeatScale): string {
  return `${scalar(low)} to ${scalar(high)}${log ? ', logarithmic' : ''}`;
}

/** The cells that are shown, in the pixels of the screen; what is not finite is crossed out. */
export function painted({ block, shape, shown, geometry, theme, ink }: View): HTMLCanvasElement {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [plotWidth(geometry), plotHeight(geometry)];
  const canvas = document.createElement('canvas');
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const paper = canvas.getContext('2d');
  if (paper === null) return canvas;
  paper.scale(ratio, ratio);
  const scale = heatScale(block);
  const row = height / Math.max(1, block.series.length);
  const gap = block.lines === undefined ? 1 : 0;
  const edges = edgesOf(shape.at, shape.domain).map((x) => Math.round((pixelOf(x, shown, geometry) - geometry.left) * ratio) / ratio);
  block.series.forEach((series, at) => {
    const odd = new Set((series.odd ?? []).map(([position]) => position));
    series.values.forEach((value, position) => {
      const [from, to] = [Math.max(0, edges[position] ?? 0), Math.min(width, edges[position + 1] ?? 0)];
      if (to <= from || (value === null && !odd.has(position))) return;
      paper.fillStyle = value === null ? ink.critical : shade(shareOf(value, scale), theme);
      paper.fillRect(from, at * row, Math.max(1, to - from), row - gap);
      if (value === null) cross(paper, from, at * row, to - from, row - 1, ink.surface);
    });
  });
  const place = (x: number, y: number): [number, number] => [pixelOf(x, shown, geometry) - geometry.left, y * row];
  contour(paper, (block.lines ?? []).map(([x, y, toX, toY]) => [place(x, y), place(toX, toY)]), ink.surface);
  rings(paper, (block.points ?? []).map(([x, y]) => place(x, y)), ink);
  return canvas;
}

function contour(paper: CanvasRenderingContext2D, lines: [[number, number], [number, number]][], colour: string): void {
  paper.strokeStyle = colour;
  paper.lineWidth = 1;
  paper.beginPath();
  for (const [from, to] of lines) {
    paper.moveTo(...from);
    paper.lineTo(...to);
  }
  paper.stroke();
}

/** Seen on light and on dark cells. */
function rings(paper: CanvasRenderingContext2D, points: [number, number][], ink: View['ink']): void {
  for (const [colour, width] of [[ink.surface, 4], [ink.critical, 1.5]] as const) {
    paper.strokeStyle = colour;
    paper.lineWidth = width;
    for (const [x, y] of points) {
      paper.beginPath();
      paper.arc(x, y, 4, 0, 2 * Math.PI);
      paper.stroke();
    }
  }
}

function cross(paper: CanvasRenderingContext2D, x: number, y: number, width: number, height: number, colour: string): void {
  paper.strokeStyle = colour;
  paper.lineWidth = 1.5;
  paper.beginPath();
  paper.moveTo(x, y);
  paper.lineTo(x + width, y + height);
  paper.moveTo(x + width, y);
  paper.lineTo(x, y + height);
  paper.stroke();
}

/** Half-way between neighbours: one more than there are columns. */
function edgesOf(at: readonly number[], domain: readonly [number, number]): number[] {
  const inner = at.slice(1).map((x, index) => (x + (at[index] ?? x)) / 2);
  return [domain[0], ...inner, domain[1]];
}
