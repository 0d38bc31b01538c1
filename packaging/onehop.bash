# Completion of onehop for bash; for zsh after `autoload bashcompinit && bashcompinit`. tools/man.py --check holds it
# against the command's own help.
_onehop() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} flags=
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "perf check tune which run info version help" -- "$word"))
        return
    fi
    case ${COMP_WORDS[1]}:$before in
        *:--device) COMPREPLY=($(compgen -W "auto cuda host" -- "$word")); return ;;
        *:-d | *:--datatype) COMPREPLY=($(compgen -W "float half bfloat16" -- "$word")); return ;;
        perf:-o | perf:--op)
            COMPREPLY=($(compgen -W "all_reduce sum reduce_scatter all_gather" -- "$word")); return ;;
        which:-o | which:--op)
            COMPREPLY=($(compgen -W "all_reduce reduce_scatter all_gather all_reduce_norm tp_qknorm" -- "$word"))
            return ;;
        *:--layout) COMPREPLY=($(compgen -W "process thread single" -- "$word")); return ;;
        *:--source) COMPREPLY=($(compgen -W "auto workspace graph multicast" -- "$word")); return ;;
        *:--compare) COMPREPLY=($(compgen -W "nccl nccl-symm" -- "$word")); return ;;
        *:-J | perf:--json | check:--json | tune:-o | tune:--output | *:--nccl-lib)
            COMPREPLY=($(compgen -f -- "$word")); return ;;
    esac
    case ${COMP_WORDS[1]} in
        perf) flags="--minbytes --maxbytes --stepfactor --ranks --iters --warmup_iters --cudagraph --eager --check
            --datatype --op --json --device --layout --ranks-per-device --algo --source --rotate --early-trigger --pin
            --compare --nccl-handover --nccl-lib --help" ;;
        check) flags="--quick --ranks --json --device --help" ;;
        tune) flags="--output --ranks --minbytes --maxbytes --datatype --noise --quick --device --early-trigger
            --nccl-handover --nccl-lib --help" ;;
        which) flags="--datatype --op --ranks --device --sm --max-blocks --graph --in-place --algo --source --row
            --nccl --multicast --help" ;;
        info) flags="--json --help" ;;
        run) flags="--print --help"
            if [[ $word != -* ]]; then COMPREPLY=($(compgen -c -- "$word")); fi ;;
        version) flags="" ;;
        help) flags="" ; [ "$COMP_CWORD" -eq 2 ] && COMPREPLY=($(compgen -W "perf check tune which info run" -- "$word")) ;;
    esac
    if [[ $word == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$word")); fi
}
complete -o default -F _onehop onehop
