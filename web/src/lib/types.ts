/**
 * The documents that the pages are made of, as `stepscope.dashboard` writes them. The server sends them, the single-file
 * report holds them; this program only lays them out. Values are raw (their unit stands beside them), null is missing.
 */

export type Unit =
  | 'ns' | 'us' | 'ms' | 's' | 'bytes' | 'share' | 'pct' | 'count' | 'per_s' | 'bytes_per_s' | 'celsius' | 'W' | 'MHz' | 'scalar' | 'number' | 'text' | '';

/** What a figure means, shown on hover and focus. `picture` names a drawing that belongs to it. */
export interface Help { text: string; picture?: 'utilisation' | null }

export interface Place { file: string; line: number | null; function: string | null; shown: string; guess?: boolean; code?: string | null }
/** Another page of the same run, with parameters. */
export interface Link { label: string; page: string; params: Record<string, string> }

export interface TextBlock { kind: 'text'; text: string; tone: 'plain' | 'head' | 'note' | 'warning' | 'good'; link?: Link }
/** Why there is nothing, and what to record so that there is. */
export interface EmptyBlock { kind: 'empty'; title: string; why: string; record: string; command: string | null }
export interface Figure { label: string; value: number | string | null; unit: Unit; help: Help | null; note: string | null; missing: string | null }
export interface FiguresBlock { kind: 'figures'; title: string | null; items: Figure[] }
/** Names with texts: environment, options. */
export interface FactsBlock { kind: 'facts'; title: string; rows: { label: string; value: string | null; note: string | null }[] }

export type Cell = number | string | boolean | null | Place;
export interface Column {
  key: string; label: string; unit: Unit; numeric: boolean; help: Help | null;
  /** A bar behind the number, as long as its share of the largest in the column. */
  bar?: boolean;
  /** A difference: always with its sign. */
  signed?: boolean;
  place?: boolean;
  /** Under this key each row names the unit of its value, instead of `unit`. */
  unit_key?: string;
  /** A click on the cell opens the page with `params` and, under `param`, the value of the row's `key`. */
  link?: { page: string; params: Record<string, string>; param: string; key: string } | null;
}
export interface TableBlock {
  kind: 'table'; id: string; title: string; columns: Column[]; rows: Record<string, Cell>[];
  /** Rows that there are; more than `rows` has where the list was cut. */
  total: number; sorted_by: string | null; notes: string[];
  /** Rows have `depth` (0 at the top) in the order of a tree, and are folded below `open_depth`. */
  tree?: boolean; open_depth?: number;
}

export interface Series {
  name: string; unit: Unit; values: (number | null)[];
  /** Of intervals. */
  low?: (number | null)[]; high?: (number | null)[];
  /** Of intervals: for every x the single measurements that its value is the mean of. */
  points?: (number | null)[][];
  /** Of lines, position and word of values that are not finite; their value is null. */
  odd?: [number, string][];
  /** Null is no point, and no gap: the line leads over it. */
  joined?: true;
  /** A value holds until the next. */
  held?: true;
  /** Behind the next series, which smooths these values. */
  faint?: true;
  /** Category of the step's partition or another name that has one colour on all pages. */
  role: string | null;
}
export interface ChartBlock {
  kind: 'chart'; id: string; title: string;
  type: 'line' | 'stacked_area' | 'stacked_bars' | 'bars' | 'histogram' | 'scatter' | 'interval' | 'heat' | 'multiples';
  /** What the picture says, in a sentence; read to those who do not see it. */
  sentence: string;
  x: { label: string; unit: Unit; values: (number | string)[] };
  y: { label: string; unit: Unit; min: number | null; max: number | null };
  series: Series[];
  /** Points or ranges of x to be pointed out. Values at an `event` are like all others. */
  marks: { from: number | string; to: number | string; label: string; event?: true }[];
  help: Help | null; notes: string[];
  /** Of a heat map that is a contour: pieces of lines (x, row, x, row) and points (x, row); rows from the upper edge of the first on. */
  lines?: [number, number, number, number][]; points?: [number, number][];
  /** Charts with the same name zoom together. */
  sync: string | null;
  /** A range drawn on x selects these on all pages; `x.values` are then step numbers. */
  select: 'steps' | null;
  /** One of many, or of an overview: low, without its sentence. */
  small?: true;
}

export interface SourceLine { line: number; text: string; here: boolean }
export interface FindingCard {
  id: string; rule: string; category: string; title: string; severity: 'critical' | 'warning' | 'info';
  confidence: 'high' | 'medium' | 'low'; cost_ms_per_step: number | null; share: number | null; gain_ceiling: number | null;
  expected_gain: { low: number; high: number } | null;
  /** What can be gained, in words; which steps cost and share are of, where these are not the steady ones. */
  gain: string | null; of: string | null;
  /** `edited`: the file has changed since the run, so that its lines may be others. */
  where: (Place & { share: number | null; source: SourceLine[] | null; edited: boolean })[];
  ranks: number[]; evidence: { metric: string; text: string; source: string }[];
  fix: string; caveat: string; learn: string; falsified_by: string;
  try: { knob: string; value: string }[];
  /** Titles of findings that this one explains, or that explain it, with their ids. */
  explains: { id: string; title: string }[]; explained_by: { id: string; title: string }[];
  disagreements: string[]; links: Link[];
  /** A command that tries the fix, null where no knob does. */
  command: string | null;
}
/** What stands in a line of a list of findings. */
export type RankedFinding = Pick<FindingCard, 'id' | 'title' | 'severity' | 'cost_ms_per_step' | 'share' | 'of' | 'command'>;
/** One screen of a run. `bar` is where a mean step goes; of `total` findings the first are listed, of the notes all but `more_notes`. */
export interface OverviewBlock {
  kind: 'overview'; figures: FiguresBlock; bar: { title: string; sentence: string; parts: { label: string; role: string; ms: number; share: number }[] } | null;
  findings: RankedFinding[]; total: number; risks: number; healthy: string | null; charts: ChartBlock[]; notes: TextBlock[]; more_notes: number;
}
export interface FindingsBlock {
  kind: 'findings'; findings: FindingCard[]; risks: FindingCard[];
  /** "Nothing worth fixing above X %", where that is so. */
  healthy: string | null;
  abstained: { rule: string; needs: string }[]; ignored: { rule: string; reason: string }[];
}

/** Slices of one window, thinned to its width. Times are ns from `from_ns`. */
export interface TimelineWindow {
  schema: 'stepscope.timeline/1'; from_ns: number; to_ns: number; names: string[]; kinds: string[];
  tracks: {
    key: string;
    /** One entry per drawn slice; `id` is -1 where `count` slices too thin to be seen were merged. */
    start: number[]; duration: number[]; depth: number[]; name: number[]; kind: number[]; id: number[]; count: number[];
  }[];
  /** Slices of the window before thinning. */
  total: number; notes: string[];
}
export interface TimelineTrack {
  key: string; label: string; group: string; kind: 'steps' | 'thread' | 'stream' | 'worker' | 'phases'; depth: number;
}
export interface TimelineBlock {
  kind: 'timeline'; id: string; from_ns: number; to_ns: number;
  steps: { step: number; process: string; from_ns: number; to_ns: number; kind: string }[];
  tracks: TimelineTrack[];
  /** The first window; in the single-file report the only one. */
  window: TimelineWindow; notes: string[];
  /** Steps that `slice` may be asked for, null where there is no trace to cut. */
  sliceable: boolean;
  /** In the single-file report: details of slices by id, as many as fit. */
  details: Record<string, SliceDetail> | null;
}
export interface SliceDetail {
  schema: 'stepscope.slice/1'; id: number; name: string; category: string; track: string; start_ns: number; duration_ns: number;
  self_ns: number | null; step: number | null;
  facts: { label: string; value: number | string | null; unit: Unit }[];
  /** The operator that launched a kernel, and the kernels that an operator launched. */
  operator: { id: number; name: string } | null; launched: { id: number; name: string; start_ns: number; duration_ns: number }[];
  place: Place | null; stack: Place[]; notes: string[];
}
export interface SearchResult {
  schema: 'stepscope.search/1'; total: number;
  hits: { id: number; name: string; track: string; depth: number; start_ns: number; duration_ns: number; step: number | null }[];
}

/** `document` is a `stepscope.flame/1` document. */
export interface FlameBlock { kind: 'flame'; id: string; document: FlameDocument; first: string | null }
export interface FlameDocument {
  schema: 'stepscope.flame/1'; title: string; notes: string[]; sides: [string, string] | null; first: number;
  names: string[]; files: string[]; kinds: [string, string, string][] | unknown[]; changes: unknown[]; legend: unknown[];
  frames: (number | null)[][]; source: Record<string, string>;
  trees: {
    key: string; label: string; unit: string; source: string; hidden: number; parent: number[]; frame: number[]; value: number[];
    base: number[] | null; change: number[] | null;
  }[];
}
/** A choice that reloads the page with `param` set: which tree, which grouping, which other run. */
export interface ChoiceBlock { kind: 'choice'; label: string; param: string; value: string; options: { value: string; label: string }[] }

/** An axis of a picture with parallel axes; of choices the values are their numbers. */
export interface Axis { label: string; log: boolean; choices: string[]; values: (number | null)[] }
export interface ParallelBlock {
  kind: 'parallel'; id: string; title: string; sentence: string; axes: Axis[];
  /** Of the lines; every axis has a value for each. */
  names: string[];
  /** Number of the axis that colours them. */
  shade: number; more_is_better: boolean;
}

/** Of a block with `folded` the title alone is seen until it is opened. */
export type Block = { folded?: true } & (
  | OverviewBlock | ParallelBlock | TextBlock | EmptyBlock | FiguresBlock | FactsBlock | TableBlock | ChartBlock | FindingsBlock | TimelineBlock | FlameBlock | ChoiceBlock
);

export interface PageDocument {
  schema: 'stepscope.page/1'; page: string; title: string; revision: number;
  /** What the page was asked for, and which of it this page can follow. */
  scope: { worker: string | null; span: string | null; steps: [number, number] | null; follows: ('worker' | 'span' | 'steps')[]; note: string | null };
  blocks: Block[];
}

export type RunState = 'running' | 'finished' | 'failed' | 'vanished' | 'unreadable';
export interface RunEntry {
  id: string; name: string; path: string; kind: 'run' | 'trace' | 'experiment' | 'sweep'; state: RunState; started_ns: number | null; duration_s: number | null;
  command: string | null; steps: number | null; mean_ms: number | null; first_finding: string | null; note: string | null;
  /** KNOB=VALUE of each that it was run with. */
  knobs: string[];
}
export interface RunList { schema: 'stepscope.runs/1'; runs: RunEntry[]; total: number }
export interface RunHead {
  schema: 'stepscope.run/1'; id: string; name: string; kind: RunEntry['kind']; state: RunState; command: string | null; started_ns: number | null;
  /** Counts up whenever pages may have changed. */
  revision: number;
  workers: { key: string; label: string }[]; spans: { key: string; label: string; worker: string }[];
  /** First and last step that can be selected. */
  steps: { first: number; last: number } | null;
  pages: { key: string; title: string; group: string; empty: boolean }[];
  preparing: Preparing | null; error: string | null;
}
/** Instead of a document, while tables are being made; ask again. `share` is 0 to 1. */
export interface Preparing { schema: 'stepscope.preparing/1'; text: string; share: number | null }
export interface Live {
  schema: 'stepscope.live/1'; state: RunState; revision: number; steps: number | null; last_step_ms: number | null; mean_ms: number | null;
  /** One sentence: what is going on, or how it ended. */
  text: string;
  /** Seconds until it is worth asking again; null: never. */
  again_s: number | null;
}
export interface Failure { schema: 'stepscope.error/1'; error: string }
/** What the single-file report holds: documents by the path they would be asked for. */
export interface Embedded { schema: 'stepscope.embedded/1'; run: string; documents: Record<string, unknown> }
