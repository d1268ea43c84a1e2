BEGIN TRANSACTION;
CREATE TABLE episode(
    seq          INTEGER PRIMARY KEY AUTOINCREMENT,
    episode_id   TEXT NOT NULL UNIQUE,
    group_id     INTEGER NOT NULL REFERENCES grp(group_id),
    sample_index INTEGER NOT NULL,
    attempt      INTEGER NOT NULL,
    state        TEXT NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'running', 'scored', 'failed', 'stale')),
    reason       TEXT,
    score        REAL CHECK (score IS NULL OR abs(score) < 1e+30),
    version      INTEGER,
    min_version  INTEGER,
    num_rounds   INTEGER NOT NULL DEFAULT 0,
    CHECK ((state = 'scored') = (score IS NOT NULL)),
    UNIQUE (group_id, sample_index, attempt)
);
INSERT INTO "episode" VALUES(1,'1-0-0',1,0,0,'scored',NULL,1.0,0,0,1);
INSERT INTO "episode" VALUES(2,'1-1-0',1,1,0,'scored',NULL,1.0,0,0,1);
INSERT INTO "episode" VALUES(3,'2-0-0',2,0,0,'scored',NULL,0.5,0,0,1);
INSERT INTO "episode" VALUES(4,'2-1-0',2,1,0,'scored',NULL,0.5,0,0,1);
INSERT INTO "episode" VALUES(5,'3-0-0',3,0,0,'scored',NULL,1.0,1,1,1);
INSERT INTO "episode" VALUES(6,'3-1-0',3,1,0,'scored',NULL,1.0,1,1,1);
INSERT INTO "episode" VALUES(7,'4-0-0',4,0,0,'scored',NULL,0.25,1,1,1);
INSERT INTO "episode" VALUES(8,'4-1-0',4,1,0,'running',NULL,NULL,1,1,1);
INSERT INTO "episode" VALUES(9,'5-0-0',5,0,0,'scored',NULL,1.0,0,0,1);
INSERT INTO "episode" VALUES(10,'5-1-0',5,1,0,'failed','broken: for good',NULL,0,NULL,0);
CREATE TABLE grp(
    group_id    INTEGER PRIMARY KEY AUTOINCREMENT,
    task_id     TEXT REFERENCES task(task_id),
    instance    INTEGER NOT NULL CHECK (instance >= 0),
    size        INTEGER NOT NULL CHECK (size >= 1),
    num_scored  INTEGER NOT NULL DEFAULT 0 CHECK (num_scored BETWEEN 0 AND size),
    min_version INTEGER,
    state       TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'ready', 'leased', 'trained', 'evicted', 'validating', 'validated')),
    reason      TEXT,
    lease_id    INTEGER REFERENCES lease(lease_id),
    replay      INTEGER,
    greedy      INTEGER NOT NULL DEFAULT 0,
    CHECK (state NOT IN ('ready', 'leased', 'trained', 'validated') OR num_scored = size),
    CHECK ((state IN ('leased', 'trained')) = (lease_id IS NOT NULL)),
    UNIQUE (task_id, instance)
);
INSERT INTO "grp" VALUES(1,'t:0',0,2,2,0,'trained',NULL,1,NULL,0);
INSERT INTO "grp" VALUES(2,'t:1',0,2,2,0,'leased',NULL,2,NULL,0);
INSERT INTO "grp" VALUES(3,'t:2',0,2,2,1,'ready',NULL,NULL,NULL,0);
INSERT INTO "grp" VALUES(4,'t:3',0,2,1,NULL,'open',NULL,NULL,NULL,0);
INSERT INTO "grp" VALUES(5,'t:4',0,2,1,NULL,'evicted','failed: broken: for good',NULL,NULL,0);
CREATE TABLE lease(
    lease_id INTEGER PRIMARY KEY AUTOINCREMENT,
    state    TEXT NOT NULL CHECK (state IN ('active', 'committed', 'released', 'superseded'))
);
INSERT INTO "lease" VALUES(1,'committed');
INSERT INTO "lease" VALUES(2,'active');
CREATE TABLE lineage(
    lineage INTEGER PRIMARY KEY,
    parent  INTEGER REFERENCES lineage(lineage),
    step    INTEGER NOT NULL CHECK (step >= 0),
    CHECK ((lineage = 0) = (parent IS NULL))
);
INSERT INTO "lineage" VALUES(0,NULL,0);
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('epoch','1');
INSERT INTO "meta" VALUES('run_id','e18366feb19e1a54');
INSERT INTO "meta" VALUES('schema_version','2');
CREATE TABLE round(
    episode_id    TEXT NOT NULL REFERENCES episode(episode_id),
    round_index   INTEGER NOT NULL CHECK (round_index >= 0),
    parent        INTEGER CHECK (parent BETWEEN 0 AND round_index - 1),
    num_sampled   INTEGER NOT NULL,
    finish_reason TEXT NOT NULL,
    body          BLOB NOT NULL,
    UNIQUE (episode_id, round_index)
);
INSERT INTO "round" VALUES('1-0-0',0,NULL,3,'stop',X'555352420100000002000000030000007049FD270100000002000000070000000800000009000000000000BE000080BE0000C0BE000000000000000000000000');
INSERT INTO "round" VALUES('1-1-0',0,NULL,3,'stop',X'555352420100000002000000030000007049FD270100000002000000070000000800000009000000000000BE000080BE0000C0BE000000000000000000000000');
INSERT INTO "round" VALUES('2-0-0',0,NULL,3,'stop',X'555352420100000002000000030000007049FD270100000002000000070000000800000009000000000000BE000080BE0000C0BE000000000000000000000000');
INSERT INTO "round" VALUES('2-1-0',0,NULL,3,'stop',X'555352420100000002000000030000007049FD270100000002000000070000000800000009000000000000BE000080BE0000C0BE000000000000000000000000');
INSERT INTO "round" VALUES('3-0-0',0,NULL,3,'stop',X'55535242010000000200000003000000E4624EC80100000002000000070000000800000009000000000000BE000080BE0000C0BE010000000100000001000000');
INSERT INTO "round" VALUES('3-1-0',0,NULL,3,'stop',X'55535242010000000200000003000000E4624EC80100000002000000070000000800000009000000000000BE000080BE0000C0BE010000000100000001000000');
INSERT INTO "round" VALUES('4-0-0',0,NULL,3,'stop',X'55535242010000000200000003000000E4624EC80100000002000000070000000800000009000000000000BE000080BE0000C0BE010000000100000001000000');
INSERT INTO "round" VALUES('4-1-0',0,NULL,3,'stop',X'55535242010000000200000003000000E4624EC80100000002000000070000000800000009000000000000BE000080BE0000C0BE010000000100000001000000');
INSERT INTO "round" VALUES('5-0-0',0,NULL,3,'stop',X'555352420100000002000000030000007049FD270100000002000000070000000800000009000000000000BE000080BE0000C0BE000000000000000000000000');
CREATE TABLE score(
    score_id   INTEGER PRIMARY KEY AUTOINCREMENT,
    episode_id TEXT NOT NULL REFERENCES episode(episode_id),
    value      REAL NOT NULL CHECK (abs(value) < 1e+30),
    verdict    TEXT NOT NULL CHECK (verdict IN ('stored', 'conflict', 'closed', 'no rounds'))
);
INSERT INTO "score" VALUES(1,'1-0-0',1.0,'stored');
INSERT INTO "score" VALUES(2,'1-1-0',1.0,'stored');
INSERT INTO "score" VALUES(3,'2-0-0',0.5,'stored');
INSERT INTO "score" VALUES(4,'2-1-0',0.5,'stored');
INSERT INTO "score" VALUES(5,'3-0-0',1.0,'stored');
INSERT INTO "score" VALUES(6,'3-1-0',1.0,'stored');
INSERT INTO "score" VALUES(7,'4-0-0',0.25,'stored');
INSERT INTO "score" VALUES(8,'5-0-0',1.0,'stored');
INSERT INTO "score" VALUES(9,'5-0-0',3.0,'conflict');
CREATE TABLE step(
    step_id    INTEGER PRIMARY KEY AUTOINCREMENT,
    lineage    INTEGER NOT NULL REFERENCES lineage(lineage),
    step       INTEGER NOT NULL,
    lease_id   INTEGER NOT NULL UNIQUE REFERENCES lease(lease_id),
    version    INTEGER NOT NULL,
    num_groups INTEGER NOT NULL,
    UNIQUE (lineage, step)
);
INSERT INTO "step" VALUES(1,0,1,1,1,1);
CREATE TABLE tally(name TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO "tally" VALUES('episodes/failed',1);
INSERT INTO "tally" VALUES('episodes/pending',0);
INSERT INTO "tally" VALUES('episodes/running',1);
INSERT INTO "tally" VALUES('episodes/scored',8);
INSERT INTO "tally" VALUES('episodes/stale',0);
INSERT INTO "tally" VALUES('evicted/failed',1);
INSERT INTO "tally" VALUES('failed/broken',1);
INSERT INTO "tally" VALUES('groups/evicted',1);
INSERT INTO "tally" VALUES('groups/leased',1);
INSERT INTO "tally" VALUES('groups/open',1);
INSERT INTO "tally" VALUES('groups/ready',1);
INSERT INTO "tally" VALUES('groups/trained',1);
INSERT INTO "tally" VALUES('groups/validated',0);
INSERT INTO "tally" VALUES('groups/validating',0);
INSERT INTO "tally" VALUES('rounds',9);
INSERT INTO "tally" VALUES('scored/evicted',1);
INSERT INTO "tally" VALUES('scored/leased',2);
INSERT INTO "tally" VALUES('scored/open',1);
INSERT INTO "tally" VALUES('scored/ready',2);
INSERT INTO "tally" VALUES('scored/trained',2);
INSERT INTO "tally" VALUES('scored/validated',0);
INSERT INTO "tally" VALUES('scored/validating',0);
INSERT INTO "tally" VALUES('tokens',27);
CREATE TABLE task(task_id TEXT PRIMARY KEY, payload TEXT NOT NULL);
INSERT INTO "task" VALUES('t:0','{"prompt": [{"role": "user", "content": "task 0"}], "data_source": "unknown", "ground_truth": 0, "agent_name": null, "extra_info": {}}');
INSERT INTO "task" VALUES('t:1','{"prompt": [{"role": "user", "content": "task 1"}], "data_source": "unknown", "ground_truth": 1, "agent_name": null, "extra_info": {}}');
INSERT INTO "task" VALUES('t:2','{"prompt": [{"role": "user", "content": "task 2"}], "data_source": "unknown", "ground_truth": 2, "agent_name": null, "extra_info": {}}');
INSERT INTO "task" VALUES('t:3','{"prompt": [{"role": "user", "content": "task 3"}], "data_source": "unknown", "ground_truth": 3, "agent_name": null, "extra_info": {}}');
INSERT INTO "task" VALUES('t:4','{"prompt": [{"role": "user", "content": "task 4"}], "data_source": "unknown", "ground_truth": 4, "agent_name": null, "extra_info": {}}');
CREATE TABLE trained(
    step_id  INTEGER NOT NULL REFERENCES step(step_id),
    group_id INTEGER NOT NULL REFERENCES grp(group_id),
    PRIMARY KEY (step_id, group_id)
) WITHOUT ROWID;
INSERT INTO "trained" VALUES(1,1);
CREATE INDEX grp_by_state ON grp(state, group_id);
CREATE INDEX grp_ready_by_version ON grp(min_version) WHERE state = 'ready';
CREATE INDEX grp_by_lease ON grp(lease_id) WHERE lease_id IS NOT NULL;
CREATE INDEX grp_replay ON grp(replay, group_id) WHERE replay IS NOT NULL;
CREATE INDEX episode_pending ON episode(attempt DESC, seq) WHERE state = 'pending';
CREATE TRIGGER grp_opened AFTER INSERT ON grp BEGIN
    INSERT INTO tally VALUES ('groups/' || NEW.state, 1) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n;
END;
CREATE TRIGGER grp_moved AFTER UPDATE OF state, num_scored ON grp BEGIN
    INSERT INTO tally VALUES ('groups/' || OLD.state, -1) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n;
    INSERT INTO tally VALUES ('groups/' || NEW.state, 1) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n;
    INSERT INTO tally VALUES ('scored/' || OLD.state, -OLD.num_scored) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n;
    INSERT INTO tally VALUES ('scored/' || NEW.state, NEW.num_scored) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n;
END;
CREATE TRIGGER grp_evicted AFTER UPDATE OF state ON grp WHEN NEW.state = 'evicted' BEGIN
    INSERT INTO tally VALUES ('evicted/' || substr(NEW.reason, 1, instr(NEW.reason || ':', ':') - 1), 1) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n;
END;
CREATE TRIGGER episode_opened AFTER INSERT ON episode BEGIN
    INSERT INTO tally VALUES ('episodes/' || NEW.state, 1) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n;
END;
CREATE TRIGGER episode_moved AFTER UPDATE OF state ON episode BEGIN
    INSERT INTO tally VALUES ('episodes/' || OLD.state, -1) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n;
    INSERT INTO tally VALUES ('episodes/' || NEW.state, 1) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n;
END;
CREATE TRIGGER episode_failed AFTER UPDATE OF state ON episode WHEN NEW.state = 'failed' BEGIN
    INSERT INTO tally VALUES ('failed/' || substr(NEW.reason, 1, instr(NEW.reason || ':', ':') - 1), 1) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n;
END;
CREATE TRIGGER round_put AFTER INSERT ON round BEGIN
    INSERT INTO tally VALUES ('rounds', 1) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n;
    INSERT INTO tally VALUES ('tokens', NEW.num_sampled) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n;
END;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('grp',5);
INSERT INTO "sqlite_sequence" VALUES('episode',10);
INSERT INTO "sqlite_sequence" VALUES('score',9);
INSERT INTO "sqlite_sequence" VALUES('lease',2);
INSERT INTO "sqlite_sequence" VALUES('step',1);
COMMIT;
