// The filters of the list of episodes: their names in the address and in a request are the same.
export const FILTERS = ["q", "step", "group", "task", "state", "group_state", "reason", "agent", "min_score", "max_score", "min_tokens", "max_tokens", "min_rounds", "max_rounds", "cause", "untrained", "sort"];

export function filtersOf(params) {
  return Object.fromEntries(FILTERS.filter((name) => params[name]).map((name) => [name, params[name]]));
}

export const CLEARED = Object.fromEntries(FILTERS.map((name) => [name, undefined]));

export const STATES = ["pending", "running", "scored", "failed"];
export const GROUP_STATES = ["open", "ready", "leased", "trained", "evicted", "validating", "validated"];
export const SORTS = [["newest", "newest first"], ["oldest", "oldest first"], ["-score", "highest score"], ["score", "lowest score"], ["-tokens", "most tokens"], ["tokens", "fewest tokens"], ["-rounds", "most rounds"], ["rounds", "fewest rounds"]];
