"""The exception tree of the project's own failures.

    UnderstudyError
    +-- TaskError            a task file or a row of it is not usable (file, row and column named)
    +-- EpisodeError         a request names an episode that cannot take it
    |   +-- UnknownEpisode       no such episode or key
    |   +-- EpisodeClosed        it ended (scored, failed, stale): nothing more is taken
    |   +-- ScoreConflict        another value was stored before; the first one stays
    +-- ScoreError           the value is not a finite number within the allowed range
    +-- LeaseError           a batch lease expired, was superseded, or is unknown
    +-- StorageFull          the disk takes nothing more for now; the same may be sent again later
    +-- WeightsError         a published version of the weights is incomplete, corrupt, or has no room
    +-- EngineError          the inference engine died or refused
    |   +-- EngineDied           a signal ended its process while it started
    +-- RequestRefused       one model call cannot be served as it is (field, rule and value named)
    +-- RequestFailed        one model call failed by a defect of ours; nothing else did
    +-- AgentError           an agent command cannot be started
    +-- EnvError             an environment cannot be started, died, or failed in an episode
    +-- ToolError            a tool cannot be loaded, or fails where its episode cannot go on without it

Messages name the thing, the rule, the value and the remedy. A bad episode is a record with a status; these exceptions
reach the caller that sent the bad input, or end the run when a loop itself is broken.
"""


class UnderstudyError(Exception):
    """Root of the tree."""


class TaskError(UnderstudyError):
    """A task file, or one of its rows, cannot be used."""


class EpisodeError(UnderstudyError):
    """A request names an episode that cannot take it."""


class UnknownEpisode(EpisodeError):
    """No episode has this id or key."""


class EpisodeClosed(EpisodeError):
    """The episode ended; nothing more is taken for it."""


class ScoreConflict(EpisodeError):
    """A different score was stored before; the first one stays."""


class ScoreError(UnderstudyError):
    """A score is not a finite number within the allowed range."""


class LeaseError(UnderstudyError):
    """A batch lease expired, was superseded, or is unknown."""


class StorageFull(UnderstudyError):
    """Nothing more can be stored for now: the disk is full or fails. Nothing acknowledged is lost."""


class WeightsError(UnderstudyError):
    """A published version of the weights is incomplete or corrupt, or there is no room for it."""


class EngineError(UnderstudyError):
    """The inference engine died or refused."""


class EngineDied(EngineError):
    """A signal ended its process while it started: nothing says that it would be so again."""


class RequestRefused(UnderstudyError, ValueError):
    """One model call cannot be served as it is: the client's to mend. `field` names what is wrong, where one field is."""

    def __init__(self, message: str, *, field: str | None = None, status: int = 400) -> None:
        """`status`: of the HTTP answer."""
        super().__init__(message)
        self.field = field
        self.status = status


class RequestFailed(UnderstudyError):
    """One model call failed, and not by what it asked for (500). Other calls are served."""


class AgentError(UnderstudyError):
    """An agent command cannot be started."""


class EnvError(UnderstudyError):
    """An environment cannot be started, died, or failed in an episode.

    `reason` is short and the same for the same kind of failure: failed episodes are counted by it.
    """

    def __init__(self, message: str, *, reason: str = "environment failed") -> None:
        super().__init__(message)
        self.reason = reason


class EnvDied(EnvError):
    """A signal ended its process while it started: nothing says that it would be so again."""


class ToolError(UnderstudyError):
    """A tool cannot be loaded, opened for an episode, or asked for its reward."""
