mount -t overlay overlay -o lowerdir={root}/usr:/usr /usr
mount --bind {state}/passwd /etc/passwd
mkdir -p /run/sshd; mount -t tmpfs -o mode=755 tmpfs /run/sshd
mkdir -p /etc/ssh/ssh_config.d; mount -t tmpfs tmpfs /etc/ssh/ssh_config.d
cp {state}/ssh/client /etc/ssh/ssh_config.d/hosts.conf
export SLURM_CONF={state}/slurm.conf
if [ "$1" = n1 ]; then
  munged -f -S {state}/munge.sock --key-file={state}/munge/key --pid-file={state}/munged.pid \
    --log-file={state}/munged.log --seed-file={state}/munge/seed
  slurmctld -c
fi
slurmd -N "$1" -d /usr/sbin/slurmstepd
/usr/sbin/sshd -f {state}/ssh/server
