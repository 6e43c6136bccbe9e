/** d3-flame-graph around one tree: drawing, zooming, searching, and walking from box to box. */

import { select } from 'd3-selection';
import flamegraph, { type FlameChart, type FlameNode, type Tooltip } from 'd3-flame-graph';
import { larger, type Box } from './tree';

export type Node = FlameNode<Box>;

export interface Look {
  /** Widths are of the other side of a difference. */
  base: boolean;
  /** The root at the top. */
  icicle: boolean;
  name(box: Box): string;
  fill(box: Box): string;
}

export interface Told {
  chosen(box: Box): void;
  zoomed(box: Box): void;
  hover(box: Box | null, event: MouseEvent | null): void;
  /** Boxes that a search found, and what they are worth together. */
  found(boxes: number, worth: number): void;
}

const CELL = 18;
const FOUND = '#ff5cf4';
const LEAST = 320;

export class Picture {
  readonly #holder: HTMLElement;
  readonly #told: Told;
  #chart: FlameChart<Box> | null = null;
  #inside: HTMLElement | null = null;
  #node: Node | null = null;
  #zoomed: Node | null = null;
  #look: Look;
  #byBox = new Map<number, Node>();

  constructor(holder: HTMLElement, look: Look, told: Told) {
    this.#holder = holder;
    this.#look = look;
    this.#told = told;
  }

  /** Draws a tree from its root. */
  draw(root: Box, look: Look): void {
    this.destroy();
    this.#look = look;
    const inside = document.createElement('div');
    this.#holder.replaceChildren(inside);
    this.#inside = inside;
    this.#chart = this.#made();
    select(inside).datum(root).call(this.#chart as never);
    const top = select<HTMLElement, Node>(inside).datum();
    this.#index(top);
    this.#node = this.#zoomed = top;
    this.#mark();
    this.#told.chosen(top.data);
  }

  resize(): void {
    if (this.#chart === null || this.#holder.clientWidth === 0) return;
    this.#chart.width(this.#width()).update();
    this.#mark();
  }

  turn(icicle: boolean): void {
    this.#look = { ...this.#look, icicle };
    this.#chart?.inverted(icicle).update();
    this.#mark();
  }

  /** To a box by its number. */
  zoom(box: number): void {
    const node = this.#byBox.get(box);
    if (this.#chart === null || node === undefined) return;
    this.#chart.zoomTo(node);
    this.#mark();
  }

  zoomHere(): void {
    if (this.#node !== null) this.zoom(this.#node.data.i);
  }

  reset(): void {
    this.#chart?.resetZoom();
    this.#mark();
  }

  search(frames: readonly boolean[] | null): void {
    if (this.#chart === null) return;
    if (frames === null) this.#chart.clear();
    else this.#chart.setSearchMatch((node) => node.parent !== null && frames[node.data.f] === true).search('found');
    this.#mark();
  }

  walk(key: string): void {
    const node = this.#node;
    if (node === null) return;
    const row = node.parent === null ? [node] : this.#seen(node.parent);
    const at = row.indexOf(node);
    const [up, down] = this.#look.icicle ? ['ArrowUp', 'ArrowDown'] : ['ArrowDown', 'ArrowUp'];
    const next = key === up ? node.parent
      : key === down ? this.#seen(node)[0]
      : key === 'ArrowLeft' ? row[at - 1]
      : row[at + 1];
    if (next !== null && next !== undefined) this.#choose(next);
  }

  destroy(): void {
    this.#chart?.destroy();
    this.#chart = null;
    this.#inside = null;
    this.#byBox.clear();
  }

  #worth(box: Box): number {
    return this.#look.base ? box.b : box.v;
  }

  #seen(node: Node): Node[] {
    return (node.children ?? []).filter((child) => this.#worth(child.data) > 0);
  }

  #width(): number {
    return Math.max(LEAST, this.#holder.clientWidth);
  }

  #choose(node: Node): void {
    this.#node = node;
    this.#mark();
    this.#told.chosen(node.data);
  }

  #made(): FlameChart<Box> {
    return flamegraph<Box>()
      .width(this.#width()).cellHeight(CELL).transitionDuration(0).minFrameSize(0.7).resetHeightOnZoom(true)
      .inverted(this.#look.icicle).tooltip(this.#tooltip())
      .sort((a, b) => larger(b.data) - larger(a.data))
      .getName((node) => this.#look.name(node.data))
      .getValue((item) => this.#worth('data' in item ? item.data : item))
      .setLabelHandler(() => '')
      .setColorMapper((node) => (node.highlight === true ? FOUND : this.#look.fill(node.data)))
      .setSearchHandler((found, sum) => this.#told.found(found.length, sum))
      .onClick((node) => {
        this.#zoomed = node;
        this.#choose(node);
        this.#told.zoomed(node.data);
      });
  }

  #tooltip(): Tooltip<Box> {
    const tooltip = (): void => undefined; // the library calls it once with the picture
    return Object.assign(tooltip, {
      show: (event: MouseEvent, node: Node) => this.#told.hover(node.data, event),
      hide: () => this.#told.hover(null, null),
      destroy: () => this.#told.hover(null, null),
    });
  }

  #index(top: Node): void {
    const waiting = [top];
    for (let node = waiting.pop(); node !== undefined; node = waiting.pop()) {
      this.#byBox.set(node.data.i, node);
      for (const child of node.children ?? []) waiting.push(child);
    }
  }

  /** The library writes the class of every box anew whenever it draws. */
  #mark(): void {
    if (this.#inside === null) return;
    select(this.#inside).selectAll<SVGGElement, Node>('g.frame')
      .classed('current', (node) => node === this.#node && node !== this.#zoomed)
      .classed('found', (node) => node.highlight === true);
  }
}
