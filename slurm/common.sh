# shellcheck shell=bash
# What the job files of this folder share: the choices of a site, and the life of a training job.
#
# Submit from the checkout: sbatch slurm/pretrain_1b.sbatch [KEY=VALUE]...   or, checked first, mhar submit FILE ...
set -euo pipefail

# --- Choices of the site. Set them in the environment of sbatch, or change the defaults here. -------------------------
#
# Partition, account, quality of service, time and GPUs a node have Slurm's own variables, which win over a job file:
#   SBATCH_PARTITION  SBATCH_ACCOUNT  SBATCH_QOS  SBATCH_TIMELIMIT  SBATCH_GPUS_PER_NODE
: "${MHAR_ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}" # the checkout, on a file system that all nodes see
: "${MHAR_VENV:=$MHAR_ROOT/.venv}"          # virtual environment with mhar; not used with a container
: "${MHAR_CONTAINER:=}"                     # container image for Pyxis (a .sqsh file or an image's name); empty: MHAR_VENV
: "${MHAR_MOUNTS:=}"                        # mounts of the container beside MHAR_ROOT and MHAR_OUTPUT_DIR: /from:/to,...
: "${MHAR_OUTPUT_DIR:=$MHAR_ROOT/runs}"     # run folders; a file system that all nodes see
: "${MHAR_TRAIN_DATA:=}"                    # data.train, as YAML: [/corpus/shard-0, /corpus/shard-1]; empty: the config's
: "${MHAR_VALID_DATA:=}"                    # data.valid, likewise
: "${MHAR_INTERFACE:=}"                     # network interface of NCCL's and gloo's sockets; empty: their choice
: "${MHAR_RANKS_PER_NODE:=}"                # empty: one a GPU
: "${MHAR_ALLOW_CPU:=}"                     # 1: let ranks compute on processors where torch sees none of the job's GPUs
: "${MHAR_RETRIES:=3}"                      # requeues in a row that bring no newer checkpoint, then the job gives up
: "${MHAR_HEALTH_CHECK:=full}"              # of the nodes, before each start: full; quick (no all-reduce); off
: "${MHAR_EXCLUDE_NODES:=2}"                # nodes found bad that a job may exclude and ask others for; then it gives up
: "${MHAR_WAIT:=240}"                       # seconds for ranks to end once those of another node have; then srun kills
# ----------------------------------------------------------------------------------------------------------------------

# Set by mhar submit: say what would be started and start nothing.
: "${MHAR_RENDER:=}"

# refuse TEXT: end the job, which would not work, with one line that says why.
refuse() {
  echo "mhar: error: $1" >&2
  exit 2
}

[ -n "$MHAR_RENDER" ] || [ -n "${SLURM_JOB_ID:-}" ] ||
  refuse "this is a job file for Slurm: sbatch FILE, or mhar submit FILE; launch/node trains without Slurm"
for name in MHAR_RETRIES MHAR_EXCLUDE_NODES MHAR_WAIT; do
  case ${!name} in
    *[!0-9]*) refuse "$name: '${!name}' given, but it must be a whole number of 0 or more" ;;
  esac
  printf -v "$name" '%d' "$((10#${!name}))" # 08 is 8
done
[ "$MHAR_WAIT" -gt 0 ] || refuse "MHAR_WAIT: 0 given, which srun takes for ever; it must be 1 or more"
[ -x "$MHAR_ROOT/launch/node" ] ||
  refuse "$MHAR_ROOT/launch/node cannot be run on $HOSTNAME: a checkout lost its modes, or lies on a noexec file system"
# Relative to the checkout; a mount of a container must be absolute.
MHAR_ROOT=$(cd "$MHAR_ROOT" >/dev/null && pwd) # with CDPATH, cd speaks
for name in MHAR_VENV MHAR_OUTPUT_DIR; do
  case ${!name} in
    /*) ;;
    *) printf -v "$name" '%s' "$MHAR_ROOT/${!name}" ;;
  esac
done
case $MHAR_CONTAINER in
  /* | ./*) ;;
  *.sqsh) MHAR_CONTAINER=$MHAR_ROOT/$MHAR_CONTAINER ;; # Pyxis takes image.sqsh for a name in a registry
esac

export MHAR_ROOT MHAR_INTERFACE MHAR_RANKS_PER_NODE MHAR_ALLOW_CPU MHAR_HEALTH_CHECK
[ -n "$MHAR_INTERFACE" ] || unset MHAR_INTERFACE
[ -n "$MHAR_RANKS_PER_NODE" ] || unset MHAR_RANKS_PER_NODE
cd "$MHAR_ROOT"

# Containers see the same paths as the host, so that a job file means the same with and without.
# launch/node starts the ranks; each may use all cores that the job has. The environment of this script is theirs, also
# where a site has SBATCH_EXPORT=NONE, which srun would follow.
site=(--ntasks-per-node=1 --cpu-bind=none --export=ALL)
[ -z "${SLURM_CPUS_ON_NODE:-}" ] || site+=(--cpus-per-task="$SLURM_CPUS_ON_NODE")
if [ -n "$MHAR_CONTAINER" ]; then
  if [ -z "$MHAR_RENDER" ] || command -v srun >/dev/null 2>&1; then
    case $(srun --help 2>&1) in
      *--container-image*) ;;
      *) refuse "MHAR_CONTAINER: $MHAR_CONTAINER given, but srun of this cluster knows no --container-image: Pyxis is not installed" ;;
    esac
  fi
  [ -n "$MHAR_RENDER" ] || mkdir -p "$MHAR_OUTPUT_DIR" # a mount must be there
  site+=(
    --container-image="$MHAR_CONTAINER"
    --container-mounts="$MHAR_ROOT:$MHAR_ROOT,$MHAR_OUTPUT_DIR:$MHAR_OUTPUT_DIR${MHAR_MOUNTS:+,$MHAR_MOUNTS}"
    --container-workdir="$MHAR_ROOT"
  )
else
  export PATH="$MHAR_VENV/bin:$PATH"
  # One on the path, of a module or of conda, does as well, but not in place of one that was asked for.
  [ -n "$MHAR_RENDER" ] || [ -x "$MHAR_VENV/bin/mhar" ] ||
    { [ "$MHAR_VENV" = "$MHAR_ROOT/.venv" ] && command -v mhar >/dev/null 2>&1; } ||
    refuse "MHAR_VENV: $MHAR_VENV has no bin/mhar on $HOSTNAME; make venv makes one in the checkout, or set MHAR_CONTAINER"
fi

# say TEXT: a line of the job's log.
say() { printf '%s job %s: %s\n' "$(date '+%Y-%m-%d %H:%M:%S')" "${SLURM_JOB_ID:-none}" "$1"; }

# Until training sets its own: what comes before a run has nothing to save.
trap 'say "SIGUSR1: the time limit is near, and no training is under way; submit it again with more time"; exit 1' USR1

# of_this_task VALUE...: the one that belongs to this task of the job array.
of_this_task() {
  local task=${SLURM_ARRAY_TASK_ID:-none}
  case $task in
    *[!0-9]*) refuse "this file is a job array: submit it with --array, as its own line has it, not without" ;;
  esac
  [ "$task" -lt $# ] || refuse "--array: task $task given, but there are 0 to $(($# - 1)): $*"
  shift "$task"
  echo "$1"
}

# on_one_node COMMAND...: run it once; a failure ends the job.
on_one_node() {
  local command=(srun --nodes=1 --ntasks=1 "${site[@]}" "$@")
  if [ -n "$MHAR_RENDER" ]; then
    render "${command[@]}"
    return
  fi
  say "$*"
  "${command[@]}" || {
    local code=$?
    say "$1 ended with code $code"
    exit "$code"
  }
}

# train NAME CONFIG [KEY=VALUE]...: train the run of that name on all nodes of the job, or go on with it.
#
# Returns once the run is finished (its summary.json is the flag). If its ranks end before, the job is put back into the
# queue and goes on from the newest complete checkpoint by the same command; it gives up after MHAR_RETRIES requeues in a
# row without a newer checkpoint, and at once where a repetition would end the same (mhar's exit code 2: bad input, a
# diverged loss, a full disk). Nodes that the health check finds bad are excluded from the next start, MHAR_EXCLUDE_NODES
# at most. Each start and end is a line in the log and in attempts.tsv of the run folder.
train() {
  local name=$1 config=$2 output=$MHAR_OUTPUT_DIR argument code reason restart=${SLURM_RESTART_COUNT:-0}
  shift 2
  local arguments=("name=$name" "output_dir=$output")
  [ -z "$MHAR_TRAIN_DATA" ] || arguments+=("data.train=$MHAR_TRAIN_DATA")
  [ -z "$MHAR_VALID_DATA" ] || arguments+=("data.valid=$MHAR_VALID_DATA")
  arguments+=("$@") # the last one given wins
  for argument in "${arguments[@]}"; do
    case $argument in
      name=*) name=${argument#*=} ;;
      output_dir=*) output=${argument#*=} ;;
    esac
  done
  local run_dir=$output/$name
  # Without --wait srun stays for ever for a node that was lost and is back before Slurm has noticed. launch/node ends
  # ranks that hang sooner.
  local command=(srun --kill-on-bad-exit=1 --wait="$MHAR_WAIT" "${site[@]}" "$MHAR_ROOT/launch/node" "$config" "${arguments[@]}")
  if [ -n "$MHAR_RENDER" ]; then
    render "${command[@]}"
    return
  fi
  # A requeue has the same settings. Another job, or a second `train` of the folder in this one, may have others: what is
  # finished for them, or refused, mhar says.
  if finished_before_requeue; then
    say "$run_dir is finished already"
    return
  fi

  # What commands are told: the number of an array's last task is also that of the whole array.
  local job=$SLURM_JOB_ID
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}_$SLURM_ARRAY_TASK_ID
  wait_for_earlier_jobs
  local earlier its_restart running
  while read -r earlier its_restart; do
    running=""
    [ "$earlier" = "$SLURM_JOB_ID" ] || running=$(name_if_running "$earlier")
    if [ -n "$running" ]; then
      refuse "$run_dir: job $running is training in this folder; wait for its end, scancel $running, or give another name=..."
    fi
    reason="the start before ended without a word: its first node was lost, or it was killed"
    record end "$reason" "$earlier" "$its_restart"
    say "$reason"
  done < <(open_starts)
  export MHAR_LOGS=$run_dir/logs/$SLURM_JOB_ID-$restart
  mkdir -p "$MHAR_LOGS" || refuse "$run_dir: the run folder cannot be written on $HOSTNAME; set MHAR_OUTPUT_DIR to one that can"
  record start "on ${SLURM_JOB_NODELIST:-?}"
  say "start $((restart + 1)) of $run_dir on ${SLURM_JOB_NODELIST:-?}, from step $(newest_step), logs in $MHAR_LOGS"
  if [ "$(fruitless_starts)" -gt $((MHAR_RETRIES + 1)) ]; then # Slurm requeues by itself when a node is lost
    end "gave up: $MHAR_RETRIES requeues brought no newer checkpoint than that of step $(newest_step)"
    exit 1
  fi

  local notice="" bad="" ranks before=""
  [ ! -s "$run_dir/summary.json" ] || before=finished
  "${command[@]}" &
  ranks=$!
  # srun passes it on to launch/node, and that to the ranks, which save and stop.
  trap 'notice=USR1; say "SIGUSR1: the time limit is near, the ranks save and stop"; kill -USR1 "$ranks"' USR1
  # Slurm has told the ranks too. It is told at once: Slurm kills this script if they take longer than its KillWait.
  trap '[ -n "$notice" ] || { notice=TERM; end "$(why_slurm_ends)"; }' TERM
  while true; do # a trapped signal ends the wait, not srun
    code=0
    wait "$ranks" || code=$?
    kill -0 "$ranks" 2>/dev/null || break
  done
  trap '' USR1 TERM # what comes now changes nothing, and must not keep the end from being told

  if [ -s "$run_dir/summary.json" ] && { [ -z "$before" ] || [ "$code" -eq 0 ]; }; then
    end "finished"
    trap - USR1 TERM
    return
  fi
  case $notice in
    TERM)
      say "the ranks have ended, the newest checkpoint is of step $(newest_step)"
      exit 143
      ;;
    USR1)
      reason="stopped ahead of the time limit (SIGUSR1)"
      ;;
    *)
      if [ "$code" -ne 0 ]; then
        reason=$(first_failure)
        code=${reason%% *} reason=${reason#* }
      elif grep -s ' stopped by ' "$run_dir/log.txt" | tail -n 1 | grep -q ' stopped by stop_after '; then
        end "stopped as asked (training.stop_after)"
        exit 0
      else
        # Slurm tells the ranks alone of a preemption with GraceTime, and of scancel --signal.
        reason="the ranks were told to stop, this script was not (preemption, scancel --signal, or a signal to a rank)"
      fi
      if [ "$code" -eq 2 ]; then
        end "$reason; not requeued: it would end the same"
        exit 2
      fi
      if [ -s "$MHAR_LOGS/bad-nodes" ]; then
        bad=$(paste -s -d , "$MHAR_LOGS/bad-nodes")
        if [ "$(bad_nodes | wc -l)" -gt "$MHAR_EXCLUDE_NODES" ]; then
          end "$reason; gave up: MHAR_EXCLUDE_NODES allows $MHAR_EXCLUDE_NODES to be excluded"
          exit 1
        fi
      fi
      ;;
  esac
  [ -z "$before" ] || reason="the run there is finished, but whether for these settings was not to be learned: $reason"
  if [ "$(fruitless_starts)" -gt "$MHAR_RETRIES" ]; then
    end "$reason; gave up: $MHAR_RETRIES requeues brought no newer checkpoint than that of step $(newest_step)"
    exit 1
  fi
  end "$reason; requeued${bad:+ without $bad}, goes on from step $(newest_step)"
  requeue
  [ -z "$bad" ] || exclude_bad_nodes # only a job that waits takes this, and it starts once this script has ended
  exit 1
}

# What follows is of train alone, and reads its variables.

# record EVENT TEXT [JOB RESTART]: a line of attempts.tsv: time, event, job, restart, step of the newest complete
# checkpoint, text; of this job by default.
record() {
  printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$(date -u '+%Y-%m-%dT%H:%M:%SZ')" "$1" "${3:-$SLURM_JOB_ID}" "${4:-$restart}" \
    "$(newest_step)" "${2//[$'\t\n\r']/ }" >>"$run_dir/attempts.tsv" || true # a full disk; the log has it too
}

end() {
  record end "$1"
  say "$1"
}

# Whether an earlier start of this job has finished the run.
finished_before_requeue() {
  [ -s "$run_dir/summary.json" ] && [ -f "$run_dir/attempts.tsv" ] &&
    awk -F '\t' -v job="$SLURM_JOB_ID" -v restart="$restart" \
      '$3 == job && $4 != restart { last = $6 } END { exit last != "finished" }' "$run_dir/attempts.tsv"
}

# Of a job that is cancelled, or requeued elsewhere, the ranks may still be saving, though it has told its end.
wait_for_earlier_jobs() {
  local jobs names="" told="" until
  until=$(($(date +%s) + MHAR_WAIT))
  [ ! -f "$run_dir/attempts.tsv" ] || jobs=$(awk -F '\t' -v job="$SLURM_JOB_ID" \
    'NF == 6 && $3 ~ /^[0-9]+$/ && $3 != job { print $3 }' "$run_dir/attempts.tsv" | sort -n -u | tail -n 9 | paste -s -d ,)
  while [ -n "${jobs:-}" ] && [ "$(date +%s)" -lt "$until" ]; do
    names=$(squeue --noheader --jobs="$jobs" --states=COMPLETING --format=%i 2>/dev/null | paste -s -d ' ') || break
    [ -n "$names" ] || break
    [ "$names" = "$told" ] || say "job $names is ending, and may be saving: waiting for it"
    told=$names
    sleep 1
  done
}

# "JOB RESTART" of each job whose last line is a start.
open_starts() {
  [ ! -f "$run_dir/attempts.tsv" ] || awk -F '\t' 'NF == 6 && $3 ~ /^[0-9]+$/ { if ($2 == "start") open[$3] = $4; else delete open[$3] }
    END { for (job in open) print job, open[job] }' "$run_dir/attempts.tsv"
}

# name_if_running NUMBER: how commands call the job of that number, ARRAY_TASK in an array, if it is running.
name_if_running() {
  squeue --noheader --jobs="$1" --format='%A %i %T' 2>/dev/null |
    awk -v number="$1" '$1 == number && $3 ~ /^(RUNNING|SUSPENDED)$/ { print $2 }' || true
}

# Step of the newest complete checkpoint, 0 without one; half-written ones have an ending.
newest_step() {
  local folder step=0
  for folder in "$run_dir"/checkpoints/step_*; do
    folder=${folder##*/step_}
    case $folder in
      *[!0-9]* | "") ;;
      *) [ $((10#$folder)) -le "$step" ] || step=$((10#$folder)) ;;
    esac
  done
  echo "$step"
}

# How often this job has started from the checkpoint that is still the newest.
fruitless_starts() {
  awk -F '\t' -v job="$SLURM_JOB_ID" -v step="$(newest_step)" \
    '$2 == "start" && $3 == job && $5 == step { n++ } END { print n + 0 }' "$run_dir/attempts.tsv"
}

# "CODE REASON" of the rank that failed first, as the launch/node of each node has left it in the logs or, where they
# cannot be written, on this machine. What mhar refuses (code 2) comes first: it is no consequence of another's end.
first_failure() {
  local text elsewhere
  elsewhere=${TMPDIR:-/tmp}/mhar-${MHAR_LOGS##*/}
  text=$(cat "$MHAR_LOGS"/node-*.end "$elsewhere"/node-*.end 2>/dev/null | awk '{ print ($2 != 2), $0 }' |
    sort -n -k 1,1 -k 2,2 | head -n 1)
  rm -rf "$elsewhere"
  if [ -n "$text" ]; then
    echo "${text#* * }"
  else
    echo "$code srun ended with code $code and no node has said why: see above, or a node was lost"
  fi
}

# Why Slurm ends this job: it may have noticed what a node has told already, that another one is lost.
why_slurm_ends() {
  local known
  known=$(cat "$MHAR_LOGS"/node-*.end 2>/dev/null | awk -v now="$(date +%s)" '$1 < now - 2' | sort -n | head -n 1)
  if [ -n "$known" ]; then
    echo "${known#* * }; Slurm ends the job (SIGTERM)"
  else
    echo "ended by Slurm (SIGTERM): cancelled, requeued by hand, preempted or out of time; the ranks save and stop"
  fi
}

requeue() {
  local said
  said=$(scontrol requeue "$job" 2>&1) && return
  case $said in
    *pending*) say "Slurm has requeued it already" ;; # for a lost node
    *) end "the requeue was refused ($said): submit the same job file again to go on" ;;
  esac
}

# Names of the nodes that were found bad at any start of this job, a line each.
bad_nodes() { cat "$run_dir/logs/$SLURM_JOB_ID"-*/bad-nodes | sort -u; }

# Ask for other nodes than the bad ones, and than those that the job was submitted without.
exclude_bad_nodes() {
  local without
  without=$(scontrol --oneliner show job "$job" | grep -o 'ExcNodeList=[^ ]*' || true)
  without=${without#ExcNodeList=}
  without=${without/#(null)/}
  scontrol update "JobId=$job" "ExcNodeList=${without:+$without,}$(bad_nodes | paste -s -d ,)" ||
    say "Slurm did not take it that $bad is to be excluded: the next start may meet it again"
}

render() {
  printf '%q ' "$@"
  echo
}
