# Draws dp_vs_ddp.svg from dp_vs_ddp.dat, the output of examples/dp_vs_ddp.c, in the current folder:
#   ./dp_vs_ddp 1 2 4 8 > dp_vs_ddp.dat && gnuplot bench/plot_dp_vs_ddp.gp
set terminal svg noenhanced size 900,360 font "Helvetica,13" background "white"
set output "dp_vs_ddp.svg"
set style data histograms
set style histogram clustered gap 1
set style fill solid 0.9 border -1
set yrange [0:*]
set grid y lc rgb "#dddddd"
set key top left reverse Left samplen 1
set xlabel "ranks"
set multiplot layout 1,3 title "data parallelism through rank 0 (DataParallel) and with DDP" font ",15"
array titles[3] = ["ms per step", "MB through rank 0 per step", "MB on rank 0"]
do for [panel = 1:3] {
    set title titles[panel]
    plot "dp_vs_ddp.dat" skip 2 using (column(2 * panel)):xtic(1) title "DataParallel" lc rgb "#d1495b", \
         "" skip 2 using (column(2 * panel + 1)) title "DDP" lc rgb "#4c78a8"
}
unset multiplot
