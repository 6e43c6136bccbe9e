/**
 * Mouse, wheel, pen and fingers on a canvas as the few things they mean. Dragging moves, dragging with Shift (or on the
 * ruler) chooses a stretch, two fingers or Ctrl and the wheel zoom, a click chooses, a double click goes close.
 */

export interface Gestures {
  /** `factor` below 1 is closer; `x` stays where it is. */
  zoom(factor: number, x: number): void;
  /** Pixels that what is shown moves to the right, and down. */
  move(dx: number, dy: number): void;
  hover(x: number, y: number, inside: boolean): void;
  click(x: number, y: number): void;
  double(x: number, y: number): void;
  /** A stretch from x to x; `done` with the last call. */
  choose(from: number, to: number, done: boolean): void;
}

/** Pixels that a pointer may tremble in a click. */
const TREMBLE = 4;

interface Drag { x: number; y: number; startX: number; choosing: boolean; moved: boolean }

/** Attaches; what is returned detaches. `alwaysChoose`: dragging chooses without Shift. */
export function gestures(node: HTMLElement, on: Gestures, alwaysChoose = false): () => void {
  const pointers = new Map<number, PointerEvent>();
  let drag: Drag | null = null;
  let pinched = false;

  const place = (event: MouseEvent): [number, number] => {
    const frame = node.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  };

  const down = (event: PointerEvent): void => {
    if (event.button !== 0) return;
    pointers.set(event.pointerId, event);
    node.setPointerCapture(event.pointerId);
    const [x, y] = place(event);
    pinched = pointers.size > 1;
    drag = pinched ? null : { x, y, startX: x, choosing: alwaysChoose || event.shiftKey, moved: false };
  };

  const pinch = (event: PointerEvent): void => {
    const other = [...pointers.values()].find((each) => each.pointerId !== event.pointerId);
    const before = pointers.get(event.pointerId);
    if (other === undefined || before === undefined) return;
    const [x, otherX] = [place(event)[0], place(other)[0]];
    const [was, y, wasY] = [place(before)[0], place(event)[1], place(before)[1]];
    const [apart, apartBefore] = [Math.abs(x - otherX), Math.abs(was - otherX)];
    if (apart > 8 && apartBefore > 8) on.zoom(apartBefore / apart, otherX);
    on.move(0, (y - wasY) / 2);
    pointers.set(event.pointerId, event);
  };

  const move = (event: PointerEvent): void => {
    const [x, y] = place(event);
    if (pointers.size > 1 && pointers.has(event.pointerId)) {
      pinch(event);
      return;
    }
    if (drag === null) {
      on.hover(x, y, true);
      return;
    }
    if (!drag.moved && Math.hypot(x - drag.x, y - drag.y) < TREMBLE) return;
    drag.moved = true;
    if (drag.choosing) on.choose(drag.startX, x, false);
    else {
      on.move(x - drag.x, y - drag.y);
      [drag.x, drag.y] = [x, y];
    }
  };

  const up = (event: PointerEvent): void => {
    pointers.delete(event.pointerId);
    const ended = drag;
    drag = null;
    if (pinched || ended === null) return;
    const [x, y] = place(event);
    if (!ended.moved) on.click(x, y);
    else if (ended.choosing) on.choose(ended.startX, x, true);
  };

  const cancel = (event: PointerEvent): void => {
    pointers.delete(event.pointerId);
    drag = null;
  };

  const wheel = (event: WheelEvent): void => {
    const unit = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
    const [dx, dy] = [event.deltaX * unit, event.deltaY * unit];
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      // pinching on a touch pad comes as small steps with Ctrl
      on.zoom(Math.exp(Math.max(-0.4, Math.min(0.4, dy * 0.01))), place(event)[0]);
    } else if (event.shiftKey || Math.abs(dx) > Math.abs(dy)) {
      event.preventDefault();
      on.move(-(dx === 0 ? dy : dx), 0);
    }
  };

  const leave = (): void => on.hover(0, 0, false);
  const double = (event: MouseEvent): void => on.double(...place(event));

  node.addEventListener('pointerdown', down);
  node.addEventListener('pointermove', move);
  node.addEventListener('pointerup', up);
  node.addEventListener('pointercancel', cancel);
  node.addEventListener('pointerleave', leave);
  node.addEventListener('wheel', wheel, { passive: false });
  node.addEventListener('dblclick', double);
  return () => {
    node.removeEventListener('pointerdown', down);
    node.removeEventListener('pointermove', move);
    node.removeEventListener('pointerup', up);
    node.removeEventListener('pointercancel', cancel);
    node.removeEventListener('pointerleave', leave);
    node.removeEventListener('wheel', wheel);
    node.removeEventListener('dblclick', double);
  };
}
