// A request as a component sees it: the last answer stays while the next one is under way, so that nothing flickers; one that
// is no longer wanted is cancelled.
import { useEffect, useRef, useState } from "../core/html.js";

export function useRequest(key, request) {
  const [state, setState] = useState({ data: null, error: null, key: null });
  const wanted = useRef(request);
  wanted.current = request;
  useEffect(() => {
    if (key === null) return undefined;
    const cancel = new AbortController();
    wanted.current(cancel.signal).then(
      (data) => !cancel.signal.aborted && setState({ data, error: null, key }),
      (problem) => !cancel.signal.aborted && setState((last) => ({ data: last.data, error: problem, key })),
    );
    return () => cancel.abort();
  }, [key]);
  return { data: state.data, error: state.error, answered: state.key, loading: state.key !== key };
}
