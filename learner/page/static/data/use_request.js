// A request as a component sees it: the last answer stays while the next one is under way, so that nothing flickers; one that
// is no longer wanted is cancelled. `revision`: the same is asked for again because the run went on.
import { useLayoutEffect, useRef, useState } from "../core/html.js";
import { drawTogether } from "./draw_together.js";

export function useRequest(what, request, revision = "") {
  const key = what === null ? null : `${what} ${revision}`;
  const [state, setState] = useState({ data: null, error: null, key: null });
  const wanted = useRef(request);
  const answered = useRef(null);
  wanted.current = request;
  // Not an effect after the frame: waiting for one makes the browser draw one.
  useLayoutEffect(() => {
    if (key === null) return undefined;
    const cancel = new AbortController();
    const again = answered.current === what;
    const take = (change) => {
      const apply = () => {
        if (cancel.signal.aborted) return;
        answered.current = what;
        setState(change);
      };
      if (again) drawTogether(apply);
      else apply();
    };
    wanted.current(cancel.signal).then(
      (data) => take({ data, error: null, key }),
      (problem) => take((last) => ({ data: last.data, error: problem, key })),
    );
    return () => cancel.abort();
  }, [key]);
  return { data: state.data, error: state.error, answered: state.key, loading: state.key !== key };
}
