/** Draws tracks onto a canvas: only what the view shows, names where they fit, what was merged as hatched strips. */

import { PAD, type Row } from './layout';
import { FOUND, INK, look } from './palette';
import { same, type Drawn, type Slice, type TrackSlices } from './slices';
import { span, toX, type View } from './view';

/** Colours of the page, which differ by theme. */
export interface Paper { text: string; muted: string; line: string; surface: string; sunken: string; accent: string; dark: boolean }

export interface Scene {
  readonly view: View;
  readonly width: number;
  readonly height: number;
  readonly scrollTop: number;
  readonly rows: readonly Row[];
  readonly drawn: Drawn;
  readonly selected: Slice | null;
  readonly hovered: Slice | null;
  /** Slices that belong to the selected one: its operator, its kernels. */
  readonly related: readonly Slice[];
  /** Names that a search found, by their numbers. */
  readonly found: ReadonlySet<number>;
  readonly range: View | null;
  readonly lines: readonly number[];
  readonly paper: Paper;
}

const FONT = 11;
/** About the width of a letter. */
const LETTER = 6.1;
const LEAST_TEXT = 26;
const CLOSEST_LINES = 8;
const SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

export function drawTracks(context: CanvasRenderingContext2D, scene: Scene): void {
  const { width, height, paper } = scene;
  context.clearRect(0, 0, width, height);
  context.fillStyle = paper.surface;
  context.fillRect(0, 0, width, height);
  for (const row of scene.rows) {
    const top = row.top - scene.scrollTop;
    if (top > height || top + row.height < 0) continue;
    drawBackground(context, scene, row, top);
  }
  drawLines(context, scene);
  context.font = `${FONT}px ${SANS}`;
  context.textBaseline = 'middle';
  const hatch = pattern(context, paper);
  for (const row of scene.rows) {
    const top = row.top - scene.scrollTop;
    const slices = row.track === null ? undefined : scene.drawn.tracks.get(row.track.key);
    if (slices !== undefined && top <= height && top + row.height >= 0) drawSlices(context, scene, row, top, slices, hatch);
  }
  drawRelations(context, scene);
  outline(context, scene, scene.hovered, paper.muted, 1);
  outline(context, scene, scene.selected, paper.text, 2.5);
  drawRange(context, scene);
}

function drawBackground(context: CanvasRenderingContext2D, scene: Scene, row: Row, top: number): void {
  if (row.kind === 'group') {
    context.fillStyle = scene.paper.sunken;
    context.fillRect(0, top, scene.width, row.height);
  }
  context.fillStyle = scene.paper.line;
  context.fillRect(0, top + row.height - 1, scene.width, 1);
}

/** Where steps begin, unless lines would stand closer than is of use. */
function drawLines(context: CanvasRenderingContext2D, scene: Scene): void {
  const seen = scene.lines.filter((ns) => ns >= scene.view.from && ns <= scene.view.to);
  if (seen.length > scene.width / CLOSEST_LINES) return;
  context.fillStyle = scene.paper.line;
  for (const ns of seen) context.fillRect(Math.round(toX(scene.view, scene.width, ns)), 0, 1, scene.height);
}

function drawSlices(
  context: CanvasRenderingContext2D, scene: Scene, row: Row, top: number, slices: TrackSlices, hatch: CanvasPattern | null,
): void {
  const { view, width, drawn } = scene;
  const scale = width / span(view);
  const height = row.level - 2;
  for (let at = 0; at < slices.start.length; at += 1) {
    const depth = slices.depth[at] ?? 0;
    if (depth >= row.levels) continue;
    const left = ((slices.start[at] ?? 0) - view.from) * scale;
    const right = ((slices.end[at] ?? 0) - view.from) * scale;
    if (right < 0 || left > width) continue;
    const x = Math.max(left, -2);
    const wide = Math.max(Math.min(right, width + 2) - x, 1);
    const y = top + PAD + depth * row.level + 1;
    if (y > scene.height || y + height < 0) continue;
    const merged = slices.id[at] === -1;
    context.fillStyle = look(drawn.kinds[slices.kind[at] ?? -1] ?? '').fill;
    // a pixel of room between neighbours, where there is room
    context.fillRect(x, y, wide > 3 ? wide - 1 : wide, height);
    if (merged && hatch !== null && wide > 2) {
      context.fillStyle = hatch;
      context.fillRect(x, y, wide, height);
    }
    if (scene.found.has(slices.name[at] ?? -1)) {
      context.fillStyle = FOUND;
      context.fillRect(x, y + height - 4, Math.max(wide - 1, 2), 4);
    }
    if (!merged && wide >= LEAST_TEXT && height >= FONT) {
      drawName(context, drawn.names[slices.name[at] ?? -1] ?? '', Math.max(x, 0), Math.min(x + wide, width), y + height / 2);
    }
  }
}

function drawName(context: CanvasRenderingContext2D, name: string, left: number, right: number, y: number): void {
  const letters = Math.floor((right - left - 7) / LETTER);
  if (letters < 2) return;
  context.fillStyle = INK;
  context.fillText(name.length <= letters ? name : `${name.slice(0, letters - 1)}…`, left + 4, y + 0.5, right - left - 6);
}

/** The box of a slice on the canvas; null where its row is folded away or its level is not known. */
function box(scene: Scene, slice: Slice): { x: number; y: number; width: number; height: number } | null {
  const row = scene.rows.find((each) => each.track?.key === slice.track);
  if (row === undefined || slice.depth < 0 || slice.depth >= row.levels) return null;
  const x = toX(scene.view, scene.width, slice.start);
  const right = toX(scene.view, scene.width, slice.end);
  if (right < 0 || x > scene.width) return null;
  const left = Math.max(x, -3);
  return {
    x: left, y: row.top - scene.scrollTop + PAD + slice.depth * row.level + 1,
    width: Math.max(Math.min(right, scene.width + 3) - left, 2), height: row.level - 2,
  };
}

function outline(context: CanvasRenderingContext2D, scene: Scene, slice: Slice | null, colour: string, line: number): void {
  const at = slice === null ? null : box(scene, slice);
  if (at === null) return;
  context.strokeStyle = colour;
  context.lineWidth = line;
  context.strokeRect(at.x + 0.5, at.y + 0.5, Math.max(at.width - 1, 2), at.height - 1);
}

/** Curves between the selected slice and what belongs to it. */
function drawRelations(context: CanvasRenderingContext2D, scene: Scene): void {
  const from = scene.selected === null ? null : box(scene, scene.selected);
  for (const slice of scene.related) {
    if (same(slice, scene.selected)) continue;
    outline(context, scene, slice, scene.paper.accent, 2);
    const to = box(scene, slice);
    if (from === null || to === null) continue;
    const [x1, y1] = [Math.max(from.x, 0), from.y + from.height / 2];
    const [x2, y2] = [Math.max(to.x, 0), to.y + to.height / 2];
    context.strokeStyle = scene.paper.accent;
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x1, y1);
    context.bezierCurveTo(x1 + 24, y1, x2 - 24, y2, x2, y2);
    context.stroke();
  }
}

/** A chosen stretch of time: what is outside is dimmed. */
function drawRange(context: CanvasRenderingContext2D, scene: Scene): void {
  if (scene.range === null) return;
  const left = toX(scene.view, scene.width, scene.range.from);
  const right = toX(scene.view, scene.width, scene.range.to);
  context.fillStyle = scene.paper.dark ? 'rgb(0 0 0 / 55%)' : 'rgb(255 255 255 / 65%)';
  if (left > 0) context.fillRect(0, 0, Math.min(left, scene.width), scene.height);
  if (right < scene.width) context.fillRect(Math.max(right, 0), 0, scene.width - Math.max(right, 0), scene.height);
  context.fillStyle = scene.paper.accent;
  context.fillRect(left - 1, 0, 2, scene.height);
  context.fillRect(right - 1, 0, 2, scene.height);
}

const hatches = new Map<boolean, CanvasPattern | null>();

/** Thin diagonal lines, for what stands for several slices. */
function pattern(context: CanvasRenderingContext2D, paper: Paper): CanvasPattern | null {
  const kept = hatches.get(paper.dark);
  if (kept !== undefined) return kept;
  const tile = document.createElement('canvas');
  tile.width = tile.height = 6;
  const pen = tile.getContext('2d');
  if (pen !== null) {
    pen.strokeStyle = paper.dark ? 'rgb(0 0 0 / 50%)' : 'rgb(255 255 255 / 75%)';
    pen.lineWidth = 1.6;
    pen.beginPath();
    for (const shift of [-6, 0, 6]) {
      pen.moveTo(shift, 6);
      pen.lineTo(shift + 6, 0);
    }
    pen.stroke();
  }
  const made = pen === null ? null : context.createPattern(tile, 'repeat');
  hatches.set(paper.dark, made);
  return made;
}
