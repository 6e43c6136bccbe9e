/** Draws the ruler above the tracks: steps as a band of boxes with their numbers, and a time axis below. */

import type { TimelineBlock } from '../lib/types';
import type { Paper } from './draw';
import { ticks, toX, type View } from './view';

export type Step = TimelineBlock['steps'][number];

export const RULER_HEIGHT = 44;
const BAND = 20;
const SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

export interface RulerScene {
  readonly view: View;
  readonly width: number;
  readonly steps: readonly Step[];
  readonly range: View | null;
  readonly paper: Paper;
}

export function drawRuler(context: CanvasRenderingContext2D, scene: RulerScene): void {
  const { width, paper } = scene;
  context.fillStyle = paper.surface;
  context.fillRect(0, 0, width, RULER_HEIGHT);
  context.font = `11px ${SANS}`;
  context.textBaseline = 'middle';
  drawSteps(context, scene);
  drawAxis(context, scene);
  if (scene.range !== null) {
    const left = toX(scene.view, width, scene.range.from);
    const right = toX(scene.view, width, scene.range.to);
    context.fillStyle = paper.accent;
    context.fillRect(left, RULER_HEIGHT - 4, Math.max(right - left, 1), 4);
  }
  context.fillStyle = paper.line;
  context.fillRect(0, RULER_HEIGHT - 1, width, 1);
}

function drawSteps(context: CanvasRenderingContext2D, scene: RulerScene): void {
  let labelled = -Infinity;
  scene.steps.forEach((step, at) => {
    const left = toX(scene.view, scene.width, step.from_ns);
    const right = toX(scene.view, scene.width, step.to_ns);
    if (right < 0 || left > scene.width) return;
    const x = Math.max(left, 0);
    const wide = Math.max(Math.min(right, scene.width) - x, 1);
    context.fillStyle = at % 2 === 0 ? scene.paper.sunken : scene.paper.surface;
    context.fillRect(x, 1, wide, BAND - 2);
    if (wide > 3) {
      context.strokeStyle = scene.paper.line;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, 1.5, wide - 1, BAND - 3);
    }
    const text = wide > 70 ? `step ${step.step}${step.kind === 'train' ? '' : ` (${step.kind})`}` : String(step.step);
    const needed = text.length * 6.2 + 6;
    if (wide < needed || x < labelled) return;
    context.fillStyle = scene.paper.text;
    context.fillText(text, x + 4, BAND / 2 + 0.5);
    labelled = x + needed;
  });
}

function drawAxis(context: CanvasRenderingContext2D, scene: RulerScene): void {
  for (const tick of ticks(scene.view, scene.width)) {
    const x = Math.round(toX(scene.view, scene.width, tick.ns));
    context.fillStyle = scene.paper.muted;
    context.fillRect(x, BAND, 1, 6);
    context.fillText(tick.label, x + 4, BAND + 11);
  }
}

/** The steps of a view, first and last; null where it shows none. */
export function stepsIn(steps: readonly Step[], view: View): [number, number] | null {
  const seen = steps.filter((step) => step.to_ns > view.from && step.from_ns < view.to).map((step) => step.step);
  return seen.length === 0 ? null : [Math.min(...seen), Math.max(...seen)];
}

/** The step that covers an instant. */
export function stepAt(steps: readonly Step[], ns: number): Step | null {
  return steps.find((step) => step.from_ns <= ns && ns < step.to_ns) ?? null;
}
