/** The part of d3-flame-graph that is used; the package ships no types. */
declare module 'd3-flame-graph' {
  import type { BaseType, Selection } from 'd3-selection';

  /** A node of d3-hierarchy with what the library adds. */
  export interface FlameNode<Datum> {
    data: Datum;
    parent: FlameNode<Datum> | null;
    children?: FlameNode<Datum>[];
    depth: number;
    highlight?: boolean;
  }

  export interface Tooltip<Datum> {
    (picture: unknown): void;
    show(event: MouseEvent, node: FlameNode<Datum>): void;
    hide(): void;
    destroy(): void;
  }

  export interface FlameChart<Datum> {
    (selection: Selection<BaseType, unknown, null, undefined>): void;
    width(pixels: number): this;
    cellHeight(pixels: number): this;
    minFrameSize(pixels: number): this;
    transitionDuration(milliseconds: number): this;
    resetHeightOnZoom(on: boolean): this;
    inverted(on: boolean): this;
    sort(order: (a: FlameNode<Datum>, b: FlameNode<Datum>) => number): this;
    tooltip(tooltip: Tooltip<Datum>): this;
    getName(name: (node: FlameNode<Datum>) => string): this;
    getValue(value: (item: Datum | FlameNode<Datum>) => number): this;
    setLabelHandler(label: (node: FlameNode<Datum>) => string): this;
    setColorMapper(fill: (node: FlameNode<Datum>, usual: string) => string): this;
    setSearchHandler(told: (found: FlameNode<Datum>[], sum: number, total: number) => void): this;
    setSearchMatch(match: (node: FlameNode<Datum>, text: string) => boolean): this;
    onClick(clicked: (node: FlameNode<Datum>) => void): this;
    search(text: string): void;
    clear(): void;
    zoomTo(node: FlameNode<Datum>): void;
    resetZoom(): void;
    update(): void;
    destroy(): void;
  }

  export default function flamegraph<Datum>(): FlameChart<Datum>;
}
