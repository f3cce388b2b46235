# Draws fsdp.svg from fsdp.dat in the current folder: bytes per rank by purpose, and step times relative
# to NO_SHARD. Called by run.sh.
set terminal svg noenhanced size 1000,420 font "Helvetica,13" background "white"
set output "fsdp.svg"
models = system("sed -n 's/^# //p' fsdp.dat | tr ' ' '_'")
set multiplot layout 1,words(models) title "ddp_fsdp.h, 2 ranks: peak memory of a rank" font ",15"
set style data histograms
set style histogram rowstacked
set style fill solid 0.9 border -1
set boxwidth 0.7
set ylabel "MB per rank"
set grid y lc rgb "#dddddd"
set key top right reverse Left samplen 1
set xtics font ",9"
do for [i=1:words(models)] {
    set title system("sed -n 's/^# //p' fsdp.dat | sed -n ".i."p")
    set autoscale y # otherwise stats would use the range of the previous plot
    stats "fsdp.dat" index i-1 using ($3+$4+$5+$6+$7) nooutput
    set yrange [0:STATS_max * 1.35]
    plot "fsdp.dat" index i-1 using 3:xtic(1) title "shards" lc rgb "#0072b2", \
         "" index i-1 using 4 title "unsharded" lc rgb "#56b4e9", \
         "" index i-1 using 5 title "gradients" lc rgb "#e69f00", \
         "" index i-1 using 6 title "optimizer state" lc rgb "#d55e00", \
         "" index i-1 using 7 title "other" lc rgb "#999999", \
         "" index i-1 using 0:($3+$4+$5+$6+$7):(sprintf("step x %.2f", $2)) with labels offset 0,0.8 notitle
}
unset multiplot
